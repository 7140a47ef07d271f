"""Whatever an engine sends, reading it never raises and never invents."""

import json

import pytest
from engine_answers import body, choice, chunk, exchange, ids, sse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchard_proxy.engines.base import Exchange
from orchard_proxy.engines.registry import ENGINES
from orchard_proxy.schema.enums import UpstreamStream
from orchard_proxy.schema.frames import EvidenceFrame
from orchard_proxy.schema.packed import count
from orchard_proxy.wire import chat

TRIES = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""

SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4)
ANY = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
IDS = st.lists(st.integers(-2, 2**33), max_size=4)


def objects(**members):
    """Objects with any of these members, each as it should be or anything at all."""
    return st.fixed_dictionaries({}, optional={key: value | ANY for key, value in members.items()})


ENTRY = objects(token=st.text(max_size=3), logprob=st.floats(), id=st.integers(-1, 9))
MESSAGE = objects(role=st.just("assistant"), content=st.text(max_size=3), tool_calls=ANY)
CHOICE = objects(
    index=st.integers(0, 2),
    message=MESSAGE,
    delta=MESSAGE,
    token_ids=IDS,
    logprobs=objects(content=st.lists(ENTRY | ANY, max_size=4)),
    finish_reason=st.sampled_from(["stop", "length"]),
    stop_reason=ANY,
)
REPORT = objects(
    tokens=IDS,
    index=st.integers(0, 1),
    prompt=ANY,
    generation_settings=objects(stop=ANY, n_predict=st.integers(0, 4)),
    stop_type=st.just("word"),
)
ANSWER = objects(
    choices=st.lists(CHOICE | ANY, max_size=3),
    prompt_token_ids=IDS,
    usage=objects(prompt_tokens=st.integers(0, 4), completion_tokens=st.integers(0, 6)),
    model=ANY,
    timings=objects(predicted_n=st.integers(-1, 4)),
    __verbose=REPORT,
    error=ANY,
)


@pytest.mark.parametrize("name", ENGINES)
@TRIES
@given(answers=st.lists(ANSWER, min_size=1, max_size=4), tokens=IDS | ANY, asked=ANY, streamed=st.booleans())
def test_evidence_is_total(name, answers, tokens, asked, streamed):
    if streamed:
        answer = b"".join(b"data: " + json.dumps(a).encode() + b"\n\n" for a in answers)
    else:
        answer = json.dumps(answers[0]).encode()
    side = [EvidenceFrame(path="/tokenize", request=b"", status=200, answer=json.dumps({"tokens": tokens}).encode())]
    request = json.dumps({"model": asked, "stop": asked}).encode()
    found = ENGINES[name].evidence(Exchange(request=request, status=200, answer=answer, side=side, logprobs_mode="raw"))
    assert len({one.index for one in found.choices}) == len(found.choices)
    for one in found.choices:
        assert 0 <= one.index < 2**16
        assert one.sampled_tokens < 2**31
        assert count(one.logprobs) in (0, count(one.token_ids))
        assert one.sampled_tokens >= count(one.token_ids)
        assert json.loads(bytes(one.message))["role"]


@pytest.mark.parametrize("name", ENGINES)
@TRIES
@given(
    answer=st.binary(max_size=40),
    status=st.sampled_from([None, 200, 204, 400, 500]),
    kind=st.sampled_from(["", "text/event-stream"]),
)
def test_bytes_are_read_or_named(name, answer, status, kind):
    found = ENGINES[name].evidence(Exchange(request=answer, status=status, answer=answer, content_type=kind))
    assert found.choices or found.problems


REQUEST = objects(
    messages=ANY,
    stream=st.booleans(),
    stream_options=ANY,
    logprobs=st.booleans(),
    top_logprobs=st.integers(-1, 3),
    return_token_ids=st.booleans(),
    include_reasoning=st.booleans(),
    verbose=st.booleans(),
    n_probs=st.integers(0, 2),
    tools=st.lists(ANY, max_size=1),
)


@pytest.mark.parametrize("name", ENGINES)
@TRIES
@given(request_=REQUEST | ANY, mode=st.sampled_from(UpstreamStream), answer=ANSWER | ANY)
def test_preparing_and_stripping_are_total(name, request_, mode, answer):
    engine = ENGINES[name]
    request = chat.decode(json.dumps(request_).encode())
    prepared = engine.prepare(request, mode)
    assert bool(prepared.edits) == (prepared.body != request.body)
    assert not (prepared.stream and prepared.synthesise)
    data = json.dumps(answer).encode()
    engine.strip_body(data, prepared)
    engine.strip_event(data, prepared)
    for _ in engine.side(request):
        break


# --- answers that contradict themselves or the request, whichever engine


def read(name, answer, n=1):
    return ENGINES[name].evidence(exchange(answer, request=json.dumps({"model": "smol", "n": n}).encode()))


def numbered(index):
    return {} if index is None else {"index": index}


def as_whole(*indexes):
    return body(*({k: v for k, v in choice([5]).items() if k != "index"} | numbered(index) for index in indexes))


def as_stream(*indexes):
    """One chunk for each choice; the same choice in one chunk where two have one index."""
    chunks = [chunk([5], delta={"content": "a"}, finish="stop", prompt_token_ids=[1, 2, 3]) for _ in indexes]
    for one, index in zip(chunks, indexes, strict=True):
        one["choices"][0].pop("index")
        one["choices"][0].update(numbered(index))
    if len({repr(index) for index in indexes}) < len(indexes):
        chunks = [chunks[0] | {"choices": [c for one in chunks for c in one["choices"]]}]
    return sse(*chunks)


BAD_INDEXES = {
    "beyond int32": ([2**31], 1, "choice_index_out_of_range"),
    "beyond int64": ([2**70], 1, "choice_index_out_of_range"),
    "2**40": ([2**40], 1, "choice_index_out_of_range"),
    "negative": ([-1], 1, "choice_index_out_of_range"),
    "n itself": ([1], 1, "choice_beyond_n"),
    "beyond n": ([0, 7], 2, "choice_beyond_n"),
    "more than n": ([0, 1, 2], 2, "choice_beyond_n"),
    "twice": ([0, 0], 2, "choice_index_repeated"),
    "three times": ([1, 1, 1], 3, "choice_index_repeated"),
    "bad ones twice": ([-1, -1], 2, "choice_index_out_of_range"),
    "true": ([True], 2, "choice_index_not_int"),
    "a float": ([0.0], 1, "choice_index_not_int"),
    "a string": (["0"], 1, "choice_index_not_int"),
    "a list": ([[0]], 1, "choice_index_not_int"),
    "missing": ([None], 1, "choice_index_missing"),
    "missing beside a good one": ([0, None], 2, "choice_index_missing"),
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("make", [as_whole, as_stream])
@pytest.mark.parametrize(("indexes", "n", "problem"), BAD_INDEXES.values(), ids=BAD_INDEXES)
def test_a_choice_whose_number_cannot_stand_gets_another(name, make, indexes, n, problem):
    found = read(name, make(*indexes), n)
    assert found.rejected
    assert problem in found.problems
    assert sorted(one.index for one in found.choices) == list(range(len(indexes))) or indexes == [1, 1, 1]
    assert len({one.index for one in found.choices}) == len(indexes)
    assert json.loads(bytes(found.choices[0].message))["content"]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("make", [as_whole, as_stream])
@pytest.mark.parametrize(
    ("indexes", "n"), [([0], 1), ([0], None), ([1, 0], 2), ([1, 0], "2"), ([0, 1], 2.0), ([0], "x"), ([0], 0)], ids=str
)
def test_good_numbers_stand(name, make, indexes, n):
    found = read(name, make(*indexes), n)
    assert [p for p in found.problems if p.startswith("choice")] == []
    assert [one.index for one in found.choices] == sorted(indexes)


def test_what_belongs_to_a_renumbered_choice_goes_with_it():
    first = chunk([5], delta={"content": "a"}, index=9, prompt_token_ids=[1])
    found = read("vllm", sse(first, chunk([6], index=0, finish="stop"), chunk([7], index=9, finish="length")))
    assert [(one.index, ids(one), one.finish_reason) for one in found.choices] == [
        (0, [6], "stop"),
        (1, [5, 7], "length"),
    ]


FIRST = chunk([5], delta={"content": "a"}, prompt_token_ids=[1, 2, 3])
LAST = chunk([6], delta={"content": "b"}, finish="stop")
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([FIRST, LAST, LAST], "output_after_finish"),
        ([FIRST, LAST, chunk([7])], "output_after_finish"),
        ([FIRST, LAST, chunk(None, delta={"content": "c"})], "output_after_finish"),
        ([FIRST, LAST, chunk(None, delta={"tool_calls": [{"index": 0}]})], "output_after_finish"),
        ([FIRST, LAST, chunk(None, finish="length")], "finish_reason_conflict"),
        ([b"[DONE]", FIRST, LAST], "output_after_done"),
        ([FIRST, LAST, b"[DONE]", chunk(None, finish="stop")], "output_after_done"),
        ([FIRST, LAST, USAGE | {"usage": {"prompt_tokens": "3", "completion_tokens": 2}}], "usage_malformed"),
        ([FIRST | {"usage": {"completion_tokens": -1}}, LAST, USAGE], "usage_malformed"),
        ([FIRST, LAST, USAGE | {"usage": [3, 2]}], "usage_malformed"),
    ],
)
def test_a_stream_that_contradicts_itself_is_rejected(name, events, problem):
    found = read(name, sse(*events))
    assert (found.rejected, problem in found.problems) == (True, True)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    "after",
    [
        [],
        [USAGE],
        [USAGE, USAGE],
        [chunk(None, delta={"role": "assistant", "content": ""})],
        [chunk(None, finish="stop")],
    ],
    ids=["nothing", "usage", "usage twice", "an empty delta", "the finish again"],
)
def test_what_says_nothing_new_after_the_end_is_no_contradiction(name, after):
    found = read(name, sse(FIRST, LAST, *after))
    assert set(found.problems) <= {"no_prompt_ids"}
    assert [(c.finish_reason, json.loads(bytes(c.message))["content"]) for c in found.choices] == [("stop", "ab")]


TWICE = {
    "ids": b'{"choices":[{"index":0,"token_ids":[5],"token_ids":[6]}]}',
    "ids, escaped": b'{"choices":[{"index":0,"token_ids":[5],"token_id\\u0073":[6]}]}',
    "logprobs": b'{"choices":[{"index":0,"logprobs":{"content":[]},"logprobs":null}]}',
    "entries": b'{"choices":[{"index":0,"logprobs":{"content":[],"content":[{"logprob":-1}]}}]}',
    "a logprob": b'{"choices":[{"index":0,"logprobs":{"content":[{"token":"a","logprob":-1,"logprob":-2}]}}]}',
    "prompt ids": b'{"prompt_token_ids":[1],"choices":[{"index":0}],"prompt_token_ids":[2]}',
    "choices": b'{"choices":[{"index":0}],"choices":[{"index":0}]}',
    "usage": b'{"choices":[{"index":0}],"usage":{},"usage":{"completion_tokens":1}}',
    "a count": b'{"choices":[{"index":0}],"usage":{"completion_tokens":1,"completion_tokens":2}}',
    "an index": b'{"choices":[{"index":0,"index":0}]}',
    "a finish": b'{"choices":[{"index":0,"finish_reason":"stop","finish_reason":"length"}]}',
    "the report": b'{"choices":[{"index":0}],"__verbose":{},"__verbose":{"tokens":[1]}}',
    "the report's ids": b'{"choices":[{"index":0}],"__verbose":{"tokens":[1],"tokens":[2]}}',
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("answer", TWICE.values(), ids=TWICE)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_a_member_that_is_there_twice_is_named(name, answer, streamed):
    found = read(name, sse(answer) if streamed else answer)
    assert (found.rejected, "member_repeated" in found.problems) == (True, True)


@pytest.mark.parametrize("name", ENGINES)
def test_words_that_look_like_members_are_none(name):
    text = '"token_ids":[6],"logprobs" \\u0074 "choices"'
    calls = [{"id": "a", "function": {"name": "index", "arguments": '{"index":1,"index":2}'}}]
    said = choice([5], text=text, message={"role": "assistant", "content": text, "tool_calls": calls})
    said["logprobs"]["content"][0]["token"] = "token_ids"
    assert "member_repeated" not in read(name, body(said)).problems


def test_a_count_that_is_none_is_not_taken():
    found = read("llamacpp", body(choice([5], None), timings={"predicted_n": 2**40}))
    assert found.choices[0].sampled_tokens < 2**31
