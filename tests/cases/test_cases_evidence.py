"""Cases 25, 26, 28, 29 and 38: token evidence is taken as it is or refused by name, never fitted."""

import json

import pytest
from case_kit import ASK, ASK_STREAM, BOTH_WAYS, ask_once, direct, dumps, events, ids, path_to, told, whole_server
from fakes.engine import Said, whole
from fakes.speech import SPEAKERS, Speech, Token, Vllm, text, with_logprobs

from orchard_proxy.schema.enums import UpstreamStream
from orchard_proxy.schema.packed import count, unpack_floats


def printing(speaker, change):
    """An engine whose answers are changed as bytes before they are sent."""

    def say(heard):
        said = speaker.say(heard)
        if heard.path == "/v1/chat/completions":
            said.pieces = [change(b"".join(said.pieces))]
        return said

    return say


# 25


ASKED = {
    "top-null": {"top_logprobs": None},
    "both-null": {"logprobs": None, "top_logprobs": None},
    "true-and-null": {"logprobs": True, "top_logprobs": None},
    "false": {"logprobs": False},
    "false-and-null": {"logprobs": False, "top_logprobs": None},
    "false-and-zero": {"logprobs": False, "top_logprobs": 0},
    "null": {"logprobs": None},
    "true": {"logprobs": True},
    "true-and-zero": {"logprobs": True, "top_logprobs": 0},
    "true-and-one": {"logprobs": True, "top_logprobs": 1},
    "null-beside-others": {"top_logprobs": None, "temperature": 0.5, "n": 1, "stop": None},
}


@pytest.mark.case(25)
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED.keys())
@BOTH_WAYS
async def test_logprobs_are_recorded_whatever_the_client_says_of_them(tmp_path, asked, ask):
    speaker = Vllm(with_logprobs(text("he", "llo"), -0.5, -0.25, -1.0))
    _, body = await ask_once(speaker, tmp_path, {**ask, **asked})
    assert body == direct(speaker, {**ask, **asked})
    record = told(tmp_path)
    assert unpack_floats(record.choice.logprobs) == [-0.5, -0.25, -1.0]
    assert record.trained == [[5, 6, 2]]


@pytest.mark.case(25)
@pytest.mark.parametrize("mode", list(UpstreamStream), ids=str)
@pytest.mark.parametrize(
    "asked", [{"top_logprobs": None}, {"logprobs": None}, {"logprobs": False}, {"logprobs": False, "n_probs": None}]
)
async def test_logprobs_of_llamacpp_are_recorded_and_not_shown(tmp_path, asked, mode):
    speaker = SPEAKERS["llamacpp"](with_logprobs(text("he", "llo"), -0.5, -0.25, -1.0))
    for number, ask in enumerate((ASK, ASK_STREAM)):
        folder = tmp_path / str(number)
        _, body = await ask_once(speaker, folder, {**ask, **asked}, engine="llamacpp", mode=mode)
        assert b"logprob" not in body
        record = told(folder)
        if ask is ASK or mode is not UpstreamStream.ON:
            assert unpack_floats(record.choice.logprobs) == [-0.5, -0.25, -1.0]
        else:  # Its own stream lacks the stop token's entry: named, never filled.
            assert record.accounting.masked == {"no_ids": record.accounting.sampled}


# 26


def more_entries(number: int):
    """Change the number of logprobs entries of a whole answer's or a stream's last token-bearing choice."""

    def change(body: bytes) -> bytes:
        entry = b'{"token":"<|im_end|>","logprob":-0.25,"bytes":null,"top_logprobs":[]}'
        assert entry in body
        if number > 0:
            return body.replace(entry, entry + (b"," + entry) * number)
        return body.replace(b"," + entry, b"").replace(b"[" + entry + b"]", b"[]")

    return change


@pytest.mark.case(26)
@pytest.mark.parametrize("number", [1, -1, 3], ids=["one-more", "one-fewer", "three-more"])
@pytest.mark.parametrize("n", [1, 2])
@BOTH_WAYS
async def test_more_or_fewer_logprobs_than_ids_reject_the_evidence(tmp_path, number, n, ask):
    speaker = Vllm(*[text("he", "llo"), text("a", "b", first=20)][:n])
    ask = {**ask, "n": n}
    _, body = await ask_once(printing(speaker, more_entries(number)), tmp_path, ask)
    assert body == direct(speaker, ask)
    record = told(tmp_path)
    assert "ids_logprobs_length" in record.problems
    assert record.call.evidence_rejected
    assert record.accounting.masked == {"evidence_rejected": 3 * n}
    assert record.trained == [[]] * n
    assert all(count(choice.logprobs) == 0 for choice in record.call.choices)


@pytest.mark.case(26)
@pytest.mark.parametrize("bad", [0, 1])
async def test_one_bad_choice_rejects_the_call(tmp_path, bad):
    """Which of two choices lies says nothing of the other, but the answer is not to be trusted."""
    good, wrong = b'"token_ids":[5,6,2]', b'"token_ids":[5,6]'
    if bad:
        good, wrong = b'"token_ids":[20,21,2]', b'"token_ids":[20,21]'
    speaker = Vllm(text("he", "llo"), text("a", "b", first=20))
    await ask_once(printing(speaker, lambda body: body.replace(good, wrong)), tmp_path, {**ASK, "n": 2})
    record = told(tmp_path)
    assert record.call.evidence_rejected
    assert record.accounting.trained == 0
    assert set(record.accounting.masked) == {"evidence_rejected"}


COUNTS = {
    "usage-more": (b'"completion_tokens":3', b'"completion_tokens":4', "ids_usage_mismatch"),
    "usage-fewer": (b'"completion_tokens":3', b'"completion_tokens":2', "ids_usage_mismatch"),
    "prompt-more": (b'"prompt_tokens":3', b'"prompt_tokens":4', "prompt_usage_mismatch"),
    "prompt-fewer": (b'"prompt_tokens":3', b'"prompt_tokens":2', "prompt_usage_mismatch"),
}


@pytest.mark.case(26)
@pytest.mark.parametrize(("good", "wrong", "problem"), COUNTS.values(), ids=COUNTS.keys())
@BOTH_WAYS
async def test_counts_that_disagree_reject_the_evidence(tmp_path, good, wrong, problem, ask):
    ask = {**ask, "stream_options": {"include_usage": True}} if ask is ASK_STREAM else ask
    speaker = Vllm(text("he", "llo"))
    await ask_once(printing(speaker, lambda body: body.replace(good, wrong)), tmp_path, ask)
    record = told(tmp_path)
    assert problem in record.problems
    assert record.accounting.trained == 0
    assert set(record.accounting.masked) == {"evidence_rejected"}


@pytest.mark.case(26)
@pytest.mark.parametrize("number", [1, -1], ids=["one-more", "one-fewer"])
@BOTH_WAYS
async def test_llamacpp_with_more_or_fewer_entries_is_never_fitted(tmp_path, number, ask):
    """One fewer is known of it (a token inside a character): the ids stay, without log-probabilities."""
    entry = b'{"id":2,"token":"<|im_end|>","bytes":' + json.dumps(list(b"<|im_end|>"), separators=(",", ":")).encode()
    entry += b',"logprob":-0.25,"top_logprobs":[]}'

    def change(body: bytes) -> bytes:
        assert entry in body
        return body.replace(b"," + entry, b"," + entry + b"," + entry if number > 0 else b"")

    speaker = SPEAKERS["llamacpp"](text("he", "llo"))
    await ask_once(printing(speaker, change), tmp_path, ask, engine="llamacpp")
    record = told(tmp_path)
    assert record.accounting.trained == 0
    assert count(record.choice.logprobs) == 0
    assert record.accounting.masked == ({"evidence_rejected": 3} if number > 0 else {"no_logprobs": 3})


# 28


BAD = {
    "nan": (b"NaN", "logprob_nan"),
    "infinity": (b"Infinity", "logprob_plus_inf"),
    "minus-infinity": (b"-Infinity", "logprob_minus_inf"),
    "overflow": (b"-1e999", "logprob_minus_inf"),
    "sentinel": (b"-9999.0", "logprob_sentinel"),
    "sentinel-int": (b"-9999", "logprob_sentinel"),
    "below-sentinel": (b"-10000.5", "logprob_sentinel"),
    "float32-min": (b"-3.4028234663852886e38", "logprob_sentinel"),
    "null": (b"null", "logprob_null"),
    "true": (b"true", "logprob_not_number"),
    "false": (b"false", "logprob_not_number"),
    "text": (b'"-0.1"', "logprob_not_number"),
    "nan-text": (b'"NaN"', "logprob_not_number"),
    "list": (b"[-0.1]", "logprob_not_number"),
    "object": (b"{}", "logprob_not_number"),
    "positive": (b"0.5", "logprob_positive"),
    "tiny-positive": (b"0.001", "logprob_positive"),
}
LATER = b'"logprob":-0.75'


@pytest.mark.case(28)
@pytest.mark.parametrize(("value", "problem"), BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("engine_name", ["vllm", "llamacpp"])
@BOTH_WAYS
async def test_a_log_probability_that_is_none_is_named_and_never_filled(tmp_path, value, problem, engine_name, ask):
    speaker = SPEAKERS[engine_name](with_logprobs(text("he", "llo"), -0.5, -0.75, -1.0))
    say = printing(speaker, lambda body: body.replace(LATER, b'"logprob":' + value))
    _, body = await ask_once(say, tmp_path, ask, engine=engine_name)
    assert b"hello" in body.replace(b'"}', b"") or [e["choices"][0]["delta"] for e in events(body)]
    record = told(tmp_path)
    assert problem in record.problems
    assert count(record.choice.logprobs) == 0
    assert record.accounting.masked == {"evidence_rejected": 3}
    assert record.trained == [[]]


@pytest.mark.case(28)
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("value", [b"NaN", b"-9999.0", b"null"], ids=["nan", "sentinel", "null"])
async def test_one_bad_value_anywhere_in_a_choice_of_two(tmp_path, at, value):
    values = [-0.5, -0.5, -0.5]
    values[at] = -0.75
    speaker = Vllm(text("a", "b", first=20), with_logprobs(text("he", "llo"), *values))
    say = printing(speaker, lambda body: body.replace(LATER, b'"logprob":' + value))
    await ask_once(say, tmp_path, {**ASK_STREAM, "n": 2})
    record = told(tmp_path)
    assert record.call.choices[0].problems == []
    assert record.call.choices[1].problems
    assert record.accounting.trained == 0


@pytest.mark.case(28)
@BOTH_WAYS
async def test_a_client_that_asked_for_logprobs_gets_what_the_engine_printed(tmp_path, ask):
    """Its JSON is the engine's affair, NaN and all; ours stays valid."""
    ask = {**ask, "logprobs": True, "top_logprobs": 0}
    speaker = Vllm(with_logprobs(text("he", "llo"), -0.5, -0.75, -1.0))

    def change(body):
        return body.replace(LATER, b'"logprob":NaN')

    _, body = await ask_once(printing(speaker, change), tmp_path, ask)
    assert body == change(direct(speaker, ask))
    assert "logprob_nan" in told(tmp_path).problems


@pytest.mark.case(28)
async def test_bad_values_of_alternatives_do_no_harm(tmp_path):
    """What was not sampled may well be impossible."""
    speaker = Vllm(with_logprobs(text("he", "llo"), -0.5, -0.75, -1.0))

    def change(body):
        return body.replace(b'"top_logprobs":[]', b'"top_logprobs":[{"token":"z","logprob":-Infinity,"bytes":null}]')

    await ask_once(printing(speaker, change), tmp_path, ASK)
    record = told(tmp_path)
    assert record.trained == [[5, 6, 2]]
    assert unpack_floats(record.choice.logprobs) == [-0.5, -0.75, -1.0]


@pytest.mark.case(28)
async def test_values_at_the_edge_are_good(tmp_path):
    """0.0 is a certain token, what float32 adds above it is noise, and a real one may be very small."""
    speaker = Vllm(with_logprobs(text("he", "llo"), 0.0, -0.0, -120.5))
    say = printing(speaker, lambda body: body.replace(b'"logprob":-0.0,', b'"logprob":2.4e-7,'))
    await ask_once(say, tmp_path, ASK)
    record = told(tmp_path)
    assert record.trained == [[5, 6, 2]]
    assert unpack_floats(record.samples[0].logprobs)[3:] == [0.0, pytest.approx(2.4e-7), -120.5]


@pytest.mark.case(28)
@pytest.mark.parametrize("value", [b"NaN", b"-Infinity", b"null"])
async def test_the_samples_of_the_control_plane_stay_json(tmp_path, value):
    """Also with NaN in what the client itself sent."""
    speaker = Vllm(with_logprobs(text("he", "llo"), -0.5, -0.75, -1.0))
    say = printing(speaker, lambda body: body.replace(LATER, b'"logprob":' + value))
    ask = {**ASK, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": float("nan")}}}]}
    async with whole_server(say, tmp_path, open=True) as server:
        assert await server.call("lab", ask) == 200
        _, found = await server.admin("GET", "/rollouts/lab/samples?wait_s=20")
        _, shown = await server.admin("GET", "/rollouts/lab")
    assert found["accounting"] == {"sampled": 3, "trained": 0, "masked": {"evidence_rejected": 3}}
    assert all(sample["logprobs"] == [] for sample in found["samples"])
    assert shown["calls"][0]["evidence_rejected"]


# 29


def bare(token_ids, *, said="", usage=None, entries="absent", prompt=(1, 3, 4), **message) -> Said:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": said, **message},
        "finish_reason": "stop",
        "token_ids": token_ids,
    }
    if entries != "absent":
        choice["logprobs"] = entries
    body = {"id": "x", "object": "chat.completion", "choices": [choice], "prompt_token_ids": list(prompt)}
    return whole(body | ({} if usage is None else {"usage": usage}))


ZERO = {"content": [{"token": "", "logprob": 0.0, "bytes": None, "top_logprobs": []}]}
FABRICATED = {
    "zero-and-no-logprobs": bare([0]),
    "zero-and-null-content": bare([0], said=None),
    "zero-and-a-zero-logprob": bare([0], entries=ZERO),
    "zeros": bare([0, 0], entries={"content": ZERO["content"] * 2}),
    "none-counted": bare([0], usage={"prompt_tokens": 3, "completion_tokens": 0}),
    "some-id-none-counted": bare([7], usage={"prompt_tokens": 3, "completion_tokens": 0}),
    "text-none-counted": bare([7], said="hello", usage={"prompt_tokens": 3, "completion_tokens": 0}),
    "empty-ids": bare([]),
    "empty-ids-and-entries": bare([], entries={"content": []}),
    "no-ids": bare(None),
    "prompt-zero": bare([5], said="a", prompt=(0,), usage={"prompt_tokens": 3, "completion_tokens": 1}),
    "empty-prompt": bare([5], said="a", prompt=()),
    "empty-calls": bare([0], tool_calls=[]),
}


@pytest.mark.case(29)
@pytest.mark.parametrize("said", FABRICATED.values(), ids=FABRICATED.keys())
async def test_ids_that_nobody_sampled_are_not_trained(tmp_path, said):
    status, _ = await ask_once(lambda _: said, tmp_path, ASK)
    assert status == 200
    record = told(tmp_path)
    assert record.accounting.trained == 0
    assert record.trained in ([[]], [])
    assert record.problems


@pytest.mark.case(29)
async def test_fabricated_ids_in_a_stream_are_not_trained(tmp_path):
    speaker = Vllm(Speech([Token(0, {}, logprob=0.0, text="")]))
    await ask_once(speaker, tmp_path, ASK_STREAM)
    record = told(tmp_path)
    assert "fabricated_ids" in record.problems
    assert record.accounting.masked == {"evidence_rejected": 1}


@pytest.mark.case(29)
@BOTH_WAYS
async def test_a_model_that_stops_at_once_did_sample_its_stop_token(tmp_path, ask):
    """An empty answer can be true."""
    await ask_once(Vllm(Speech([Token(2, {}, text="<|im_end|>")])), tmp_path, ask)
    assert told(tmp_path).trained == [[2]]


@pytest.mark.case(29)
@pytest.mark.parametrize("engine_name", ["vllm", "llamacpp"])
async def test_fabricated_ids_beside_a_true_choice(tmp_path, engine_name):
    fabricated = Speech([Token(0, {}, logprob=0.0, text="")])
    speaker = SPEAKERS[engine_name](text("he", "llo"), fabricated)
    await ask_once(speaker, tmp_path, {**ASK, "n": 2}, engine=engine_name)
    record = told(tmp_path)
    assert "fabricated_ids" in record.call.choices[1].problems
    assert record.accounting.trained == 0


# 38


IDS = {
    "negative": -1,
    "far-negative": -(2**31),
    "beyond-int32": 2**31,
    "beyond-int64": 2**63,
    "huge": 10**30,
    "unsigned-minus-one": 2**32 - 1,
    "int32-max": 2**31 - 1,
    "a-billion": 10**9,
    "float": 6.0,
    "fraction": 6.5,
    "true": True,
    "text": "6",
    "null": None,
    "list": [6],
}


@pytest.mark.case(38)
@pytest.mark.parametrize("bad", IDS.values(), ids=IDS.keys())
@pytest.mark.parametrize(("where", "ask"), [("answer", ASK), ("answer", ASK_STREAM), ("prompt", ASK_STREAM)])
async def test_an_id_that_no_vocabulary_has_rejects_the_evidence(tmp_path, bad, where, ask):
    tokens = [Token(5, {"content": "a"}), Token(bad if where == "answer" else 6, {"content": "b"}), Token(2, {})]
    speaker = Vllm(Speech(tokens), prompt=(1, bad if where == "prompt" else 3, 4))
    _, body = await ask_once(speaker, tmp_path, ask)
    assert body == direct(speaker, ask)
    record = told(tmp_path)
    prefix = "prompt_" if where == "prompt" else ""
    assert {f"{prefix}id_out_of_range", f"{prefix}id_not_int"} & set(record.problems)
    assert record.accounting.masked == {"evidence_rejected": 3}
    assert record.trained == [[]]


@pytest.mark.case(38)
@pytest.mark.parametrize("where", ["answer", "prompt"])
@BOTH_WAYS
async def test_an_id_beyond_the_vocabulary_of_llamacpp_is_refused(tmp_path, where, ask):
    """It tells its size; an id just inside is good, one just outside is none."""
    for bad, trained in [(49151, True), (49152, False)]:
        tokens = [Token(bad if where == "answer" else 6, {"content": "b"}, text="b"), Token(2, {}, text="")]
        speaker = SPEAKERS["llamacpp"](Speech(tokens), prompt=(1, bad if where == "prompt" else 3, 4))
        async with path_to(speaker, tmp_path / str(bad), engine="llamacpp", n_vocab=49152) as (_, proxy):
            async with proxy.post(dumps(ask)) as answer:
                assert answer.status == 200
                await answer.read()
        record = told(tmp_path / str(bad))
        assert (record.accounting.trained > 0) is trained
        assert record.accounting.masked == ({} if trained else {"evidence_rejected": 2})


@pytest.mark.case(38)
async def test_largest_ids_of_real_vocabularies_are_good(tmp_path):
    tokens = [Token(262143, {"content": "a"}), Token(1_000_001, {"content": "b"}), Token(0, {"content": "c"})]
    await ask_once(Vllm(Speech(tokens)), tmp_path, ASK)
    record = told(tmp_path)
    assert ids(record.choice) == [262143, 1_000_001, 0]
    assert record.accounting.trained == 3
