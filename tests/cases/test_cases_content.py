"""Cases 9, 10, 12 to 15 and 20: what a stream or a body says, choice by choice, and the ids beside it."""

import json

import pytest
from case_kit import (
    ASK,
    ASK_STREAM,
    BOTH_WAYS,
    ask_once,
    direct,
    dumps,
    events,
    ids,
    message,
    path_to,
    sdk,
    told,
)
from fakes.engine import stream, whole
from fakes.speech import DONE, SPEAKERS, LlamaCpp, Speech, Token, Vllm, text

from orchard_proxy.schema.enums import IdsGrade, MaskedReason, Outcome, UpstreamStream
from orchard_proxy.schema.packed import count

INSTRUMENTED = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
HIDE = {"include_reasoning": False}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def chunk(delta, *, index=0, finish=None, **members) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, **members}
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


def entry(value=-0.25, token="x"):
    return {"token": token, "logprob": value, "bytes": None, "top_logprobs": []}


def token(delta, *, ids, index=0, finish=None) -> bytes:
    return chunk(delta, index=index, finish=finish, token_ids=ids).replace(
        b'"logprobs":null', b'"logprobs":' + json.dumps({"content": [entry() for _ in ids]}).encode()
    )


def role(index=0, prompt=(1, 3, 4)) -> bytes:
    first = json.loads(chunk({"role": "assistant", "content": ""}, index=index)[6:])
    return b"data: " + json.dumps({**first, "prompt_token_ids": list(prompt)}, separators=(",", ":")).encode() + b"\n\n"


# 9


SILENT = {
    "empty": {},
    "content-null": {"content": None},
    "content-empty": {"content": ""},
    "no-calls": {"tool_calls": []},
    "null": None,
}


@pytest.mark.case(9)
@pytest.mark.parametrize("delta", SILENT.values(), ids=SILENT.keys())
@pytest.mark.parametrize("at", [0, 1, 3], ids=["first", "middle", "before-the-end"])
async def test_ids_of_chunks_that_say_nothing_are_kept(tmp_path, delta, at):
    pieces = [token({"content": "a"}, ids=[5]), token({"content": "b"}, ids=[6]), token({"content": "c"}, ids=[7])]
    pieces.insert(at, token(delta, ids=[90]) + token(delta, ids=[91, 92]))
    body = role() + b"".join(pieces) + token({}, ids=[2], finish="stop") + DONE
    await ask_once(lambda _: stream(body, 13), tmp_path, ASK_STREAM)
    expected = [5, 6, 7]
    expected[at:at] = [90, 91, 92]
    record = told(tmp_path)
    assert ids(record.choice) == [*expected, 2]
    assert record.trained == [[*expected, 2]]
    assert message(record.choice)["content"] == "abc"


@pytest.mark.case(9)
@pytest.mark.parametrize("speeches", [1, 2])
@pytest.mark.parametrize(
    "asked",
    [{}, {"logprobs": True}, {"return_token_ids": True}, {"logprobs": True, "top_logprobs": 1}],
    ids=["plain", "logprobs", "ids", "top"],
)
async def test_the_client_sees_chunks_that_say_nothing_only_where_it_would_without_us(tmp_path, speeches, asked):
    tokens = [Token(5, {"content": "a"}), Token(6, {}), Token(7, {}), Token(8, {"content": "b"}), Token(2, {})]
    speaker = Vllm(*[Speech(tokens)] * speeches)
    ask = {**ASK_STREAM, **asked, "n": speeches}
    _, body = await ask_once(speaker, tmp_path, ask)
    assert body == direct(speaker, ask)
    assert [ids(choice) for choice in told(tmp_path).call.choices] == [[5, 6, 7, 8, 2]] * speeches


# 10


THOUGHT = [
    Token(10, {"reasoning": "let me "}, text="let me "),
    Token(11, {"reasoning": "think"}, text="think"),
    Token(12, {}, text="</think>"),
    Token(13, {"content": "4"}, text="4"),
    Token(2, {}, text="<|im_end|>"),
]


def spelt(tokens, key):
    return [t._replace(delta={key if k == "reasoning" else k: v for k, v in t.delta.items()}) for t in tokens]


@pytest.mark.case(10)
@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("n", [1, 2])
@BOTH_WAYS
async def test_reasoning_is_hidden_by_us_so_that_ids_are_kept(tmp_path, key, n, ask):
    speaker = Vllm(*[Speech(spelt(THOUGHT, key))] * n, reasoning=key)
    ask = {**ask, **HIDE, "n": n}
    async with path_to(speaker, tmp_path) as (engine, proxy):
        async with proxy.post(dumps(ask)) as answer:
            body = await answer.read()
    assert engine.heard[0].json["include_reasoning"] is True
    assert body == direct(speaker, ask)
    assert b"think" not in body
    record = told(tmp_path)
    assert [ids(choice) for choice in record.call.choices] == [[10, 11, 12, 13, 2]] * n
    assert record.trained == [[10, 11, 12, 13, 2]] * n
    assert message(record.call.choices[0])["reasoning_content"] == "let me think"
    assert any(edit.startswith("reasoning_kept") for edit in record.call.edits)
    assert any(edit.startswith("field:include_reasoning") for edit in record.call.edits)


@pytest.mark.case(10)
async def test_hidden_reasoning_in_a_chunk_with_other_things(tmp_path):
    """The content beside it stays, and so does a finish inside the thinking."""
    tokens = [
        Token(10, {"reasoning": "hm"}),
        Token(11, {"reasoning": "!", "content": "4"}),
        Token(12, {"reasoning": "and"}),
    ]
    speaker = Vllm(Speech(tokens, finish="length"))
    _, body = await ask_once(speaker, tmp_path, {**ASK_STREAM, **HIDE})
    deltas = [event["choices"][0]["delta"] for event in events(body)]
    assert [delta.get("content") for delta in deltas] == ["", "4", None]
    assert not any(delta.get("reasoning") for delta in deltas)
    assert events(body)[-1]["choices"][0]["finish_reason"] == "length"
    record = told(tmp_path)
    assert record.call.outcome is Outcome.LENGTH
    assert record.trained == [[10, 11, 12]]


@pytest.mark.case(10)
@pytest.mark.parametrize("mode", list(UpstreamStream))
async def test_hidden_reasoning_in_every_way_a_stream_is_made(tmp_path, mode):
    speaker = Vllm(Speech(THOUGHT))
    _, body = await ask_once(speaker, tmp_path, {**ASK_STREAM, **HIDE}, mode=mode)
    assert b"think" not in body
    assert told(tmp_path).trained == [[10, 11, 12, 13, 2]]


@pytest.mark.case(10)
@pytest.mark.parametrize("asked", [{}, {"include_reasoning": True}, {"include_reasoning": None}], ids=str)
@BOTH_WAYS
async def test_reasoning_that_the_client_did_not_hide_is_shown(tmp_path, asked, ask):
    speaker = Vllm(Speech(THOUGHT))
    _, body = await ask_once(speaker, tmp_path, {**ask, **asked})
    assert body == direct(speaker, {**ask, **asked})
    assert b"think" in body
    assert told(tmp_path).trained == [[10, 11, 12, 13, 2]]


@pytest.mark.case(10)
@pytest.mark.parametrize("asked", [{"logprobs": True}, {"return_token_ids": True}], ids=["logprobs", "ids"])
@BOTH_WAYS
async def test_hidden_reasoning_of_a_client_that_asks_for_evidence_itself(tmp_path, asked, ask):
    """The engine hides both with it, and so do we."""
    speaker = Vllm(Speech(THOUGHT))
    _, body = await ask_once(speaker, tmp_path, {**ask, **HIDE, **asked})
    assert body == direct(speaker, {**ask, **HIDE, **asked})
    assert b"think" not in body
    assert told(tmp_path).trained == [[10, 11, 12, 13, 2]]


# 12


PAIR = (
    text("a", "b", first=5, finish="length", end=None),
    text("c", "d", "e", first=20),
)


@pytest.mark.case(12)
@pytest.mark.parametrize("size", [0, 1, 40])
async def test_two_streamed_choices_have_their_own_ids_and_finishes(tmp_path, size):
    speaker = Vllm(*PAIR, sizes=size)
    ask = {**ASK_STREAM, "n": 2}
    _, body = await ask_once(speaker, tmp_path, ask)
    assert body == direct(speaker, ask)
    finishes = {c["index"]: c["finish_reason"] for e in events(body) for c in e["choices"] if c["finish_reason"]}
    assert finishes == {0: "length", 1: "stop"}
    record = told(tmp_path)
    assert [(c.index, ids(c), count(c.logprobs), c.finish_reason) for c in record.call.choices] == [
        (0, [5, 6], 2, "length"),
        (1, [20, 21, 22, 2], 4, "stop"),
    ]
    assert [message(choice)["content"] for choice in record.call.choices] == ["ab", "cde"]
    assert record.trained == [[5, 6], [20, 21, 22, 2]]
    assert [sample.branch_reason for sample in record.samples] == ["main", "choice"]


ORDERS = {
    "one-after-the-other": lambda a, b: [*a, *b],
    "backwards": lambda a, b: [*b, *a],
    "alternating": lambda a, b: [event for pair in zip(a, b, strict=True) for event in pair],
    "late-role": lambda a, b: [*a[:3], *b, *a[3:]],
}


@pytest.mark.case(12)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
async def test_choices_in_any_order(tmp_path, order):
    made = [
        [
            role(index),
            token({"content": "x"}, ids=[first], index=index),
            token({"content": "y"}, ids=[first + 1], index=index),
            token({}, ids=[2], index=index, finish=finish),
        ]
        for index, first, finish in [(0, 5, "stop"), (1, 20, "length")]
    ]
    body = b"".join(order(*made)) + DONE
    _, seen = await ask_once(lambda _: stream(body, 17), tmp_path, {**ASK_STREAM, "n": 2})
    assert sum(1 for e in events(seen) if e["choices"][0]["finish_reason"]) == 2
    record = told(tmp_path)
    assert [(ids(c), c.finish_reason) for c in record.call.choices] == [([5, 6, 2], "stop"), ([20, 21, 2], "length")]
    assert record.call.outcome is Outcome.LENGTH


@pytest.mark.case(12)
async def test_two_choices_in_one_event(tmp_path):
    def both(*pairs, **top) -> bytes:
        choices = [
            {"index": i, "delta": d, "logprobs": {"content": [entry()] * len(t)}, "finish_reason": f, "token_ids": t}
            for i, d, t, f in pairs
        ]
        return b"data: " + json.dumps({"id": "x", "choices": choices, **top}).encode() + b"\n\n"

    body = (
        both((0, {"role": "assistant"}, [], None), (1, {"role": "assistant"}, [], None), prompt_token_ids=[1, 3, 4])
        + both((1, {"content": "c"}, [20], None), (0, {"content": "a"}, [5], None))
        + both((0, {}, [2], "stop"), (1, {"content": "d"}, [21], "length"))
        + DONE
    )
    _, seen = await ask_once(lambda _: stream(body), tmp_path, {**ASK_STREAM, "n": 2})
    assert [[c["token_ids"] for c in e["choices"]] for e in events(seen)] == [[None, None]] * 3
    record = told(tmp_path)
    assert record.trained == [[5, 2], [20, 21]]


@pytest.mark.case(12)
async def test_the_sdk_has_both_choices(tmp_path):
    async with path_to(Vllm(*PAIR), tmp_path) as (_, proxy), sdk(proxy) as client:
        async with client.chat.completions.stream(**ASK, n=2) as streamed:
            async for _ in streamed:
                pass
            final = streamed.current_completion_snapshot
    assert [(c.message.content, c.finish_reason) for c in final.choices] == [("ab", "length"), ("cde", "stop")]


@pytest.mark.case(12)
@pytest.mark.parametrize("engine_name", ["vllm", "llamacpp", "openai"])
@pytest.mark.parametrize("mode", list(UpstreamStream))
async def test_two_choices_whatever_the_engine(tmp_path, engine_name, mode):
    """No engine loses a choice or a finish; where ids are not sure, the choice says so."""
    speaker = SPEAKERS[engine_name](*PAIR)
    ask = {**ASK_STREAM, "n": 2}
    _, body = await ask_once(speaker, tmp_path, ask, engine=engine_name, mode=mode)
    finishes = {c["index"]: c["finish_reason"] for e in events(body) for c in e["choices"] if c["finish_reason"]}
    assert finishes == {0: "length", 1: "stop"}
    record = told(tmp_path)
    assert [message(choice)["content"] for choice in record.call.choices] == ["ab", "cde"]
    assert [choice.finish_reason for choice in record.call.choices] == ["length", "stop"]
    assert len(record.samples) == 2
    for choice, speech in zip(record.call.choices, PAIR, strict=True):
        assert ids(choice) in ([], speech.ids)
        assert ids(choice) or choice.problems


# 13


def fragment(index, *, id=None, name=None, arguments=None, **more):  # noqa: A002 -- the API's own word
    function = {k: v for k, v in (("name", name), ("arguments", arguments)) if v is not None}
    one = {"index": index, "id": id, "type": "function" if id else None, "function": function, **more}
    return {"tool_calls": [{k: v for k, v in one.items() if v is not None}]}


CALLS = {
    "interleaved": [
        fragment(0, id="c0", name="look", arguments=""),
        fragment(1, id="c1", name="look", arguments=""),
        fragment(0, arguments='{"at":'),
        fragment(1, arguments='{"at": "b'),
        fragment(0, arguments=' "a"}'),
        fragment(1, arguments='"}'),
    ],
    "one-after-the-other": [
        fragment(0, id="c0", name="look", arguments='{"at":'),
        fragment(0, arguments=' "a"}'),
        fragment(1, id="c1", name="look", arguments='{"at": '),
        fragment(1, arguments='"b"}'),
    ],
    "one-index-two-ids": [
        fragment(0, id="c0", name="look", arguments='{"at":'),
        fragment(0, arguments=' "a"}'),
        fragment(0, id="c1", name="look", arguments='{"at": '),
        fragment(0, arguments='"b"}'),
    ],
    "one-index-whole-calls": [
        fragment(0, id="c0", name="look", arguments='{"at": "a"}'),
        fragment(0, id="c1", name="look", arguments='{"at": "b"}'),
    ],
    "id-in-every-fragment": [
        fragment(0, id="c0", name="look", arguments='{"at":'),
        fragment(0, id="c0", arguments=' "a"}'),
        fragment(1, id="c1", name="look", arguments='{"at": '),
        fragment(1, id="c1", arguments='"b"}'),
    ],
    "ids-interleaved-on-one-index": [
        fragment(0, id="c0", name="look", arguments='{"at":'),
        fragment(0, id="c1", name="look", arguments='{"at": '),
        fragment(0, id="c0", arguments=' "a"}'),
        fragment(0, id="c1", arguments='"b"}'),
    ],
    "name-behind-id": [
        fragment(0, id="c0"),
        fragment(0, name="look"),
        fragment(0, arguments='{"at": "a"}'),
        fragment(1, id="c1"),
        fragment(1, name="look", arguments='{"at": "b"}'),
    ],
    "no-index": [
        {"tool_calls": [{"id": "c0", "type": "function", "function": {"name": "look", "arguments": '{"at": "a"}'}}]},
        {"tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "b"}'}}]},
    ],
    "two-in-one-delta": [
        {
            "tool_calls": [
                *fragment(0, id="c0", name="look", arguments='{"at": ')["tool_calls"],
                *fragment(1, id="c1", name="look", arguments='{"at": "b"}')["tool_calls"],
            ]
        },
        fragment(0, arguments='"a"}'),
    ],
}
TWO_CALLS = [("c0", "look", {"at": "a"}), ("c1", "look", {"at": "b"})]


def calls_of(choice) -> list:
    return [
        (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message(choice)["tool_calls"]
    ]


@pytest.mark.case(13)
@pytest.mark.parametrize("fragments", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("size", [0, 1])
async def test_streamed_parallel_calls_are_two_calls(tmp_path, fragments, size):
    tokens = [Token(5 + i, delta) for i, delta in enumerate(fragments)]
    speaker = Vllm(Speech([*tokens, Token(2, {})], finish="tool_calls"), sizes=size)
    ask = {**ASK_STREAM, "tools": TOOLS}
    _, body = await ask_once(speaker, tmp_path, ask)
    assert body == direct(speaker, ask)
    record = told(tmp_path)
    assert calls_of(record.choice) == TWO_CALLS
    assert ids(record.choice) == [*range(5, 5 + len(fragments)), 2]
    assert message(record.choice)["content"] is None
    assert record.choice.finish_reason == "tool_calls"
    last = json.loads(bytes(record.samples[0].messages))[-1]
    assert [call["id"] for call in last["tool_calls"]] == ["c0", "c1"]


@pytest.mark.case(13)
async def test_parallel_calls_of_two_choices_do_not_mix(tmp_path):
    """Also where only the id tells one choice's call from the other's."""
    first = [Token(5 + i, delta) for i, delta in enumerate(CALLS["one-index-two-ids"])]
    second = [Token(20, fragment(0, id="d0", name="see", arguments="{}"))]
    speaker = Vllm(Speech(first, finish="tool_calls"), Speech(second, finish="tool_calls"))
    await ask_once(speaker, tmp_path, {**ASK_STREAM, "n": 2})
    record = told(tmp_path)
    assert calls_of(record.call.choices[0]) == TWO_CALLS
    assert calls_of(record.call.choices[1]) == [("d0", "see", {})]


@pytest.mark.case(13)
@pytest.mark.parametrize("engine_name", ["vllm", "llamacpp", "openai"])
@pytest.mark.parametrize("mode", [UpstreamStream.AUTO, UpstreamStream.OFF], ids=str)
async def test_the_sdk_has_two_calls_whatever_the_engine(tmp_path, engine_name, mode):
    tokens = [Token(5 + i, delta) for i, delta in enumerate(CALLS["interleaved"])]
    called = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for id, name, arguments in TWO_CALLS  # noqa: A001 -- the API's own word
    ]
    speech = Speech([*tokens, Token(2, {})], finish="tool_calls", message={"tool_calls": called})
    speaker = SPEAKERS[engine_name](speech)
    async with path_to(speaker, tmp_path, engine=engine_name, mode=mode) as (_, proxy), sdk(proxy) as client:
        async with client.chat.completions.stream(**ASK, tools=TOOLS) as streamed:
            async for _ in streamed:
                pass
            final = streamed.current_completion_snapshot.choices[0]
        made = await client.chat.completions.create(**ASK, tools=TOOLS)
    for said in (final, made.choices[0]):
        calls = [(c.id, c.function.name, json.loads(c.function.arguments)) for c in said.message.tool_calls]
        assert calls == TWO_CALLS
        assert said.finish_reason == "tool_calls"
    assert [calls_of(call.choices[0]) for call in told(tmp_path).calls] == [TWO_CALLS] * 2


# 14


@pytest.mark.case(14)
@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("mode", list(UpstreamStream), ids=str)
@BOTH_WAYS
async def test_reasoning_is_one_field_in_the_record_and_passes_as_spelt(tmp_path, key, mode, ask):
    speaker = Vllm(Speech(spelt(THOUGHT, key)), reasoning=key)
    _, body = await ask_once(speaker, tmp_path, ask, mode=mode)
    if ask is ASK:
        assert json.loads(body)["choices"][0]["message"][key] == "let me think"
    else:
        assert "".join(e["choices"][0]["delta"].get(key) or "" for e in events(body)) == "let me think"
    other = {"reasoning": "reasoning_content", "reasoning_content": "reasoning"}[key]
    assert b'"%s":"' % other.encode() not in body
    record = told(tmp_path)
    assert message(record.choice)["reasoning_content"] == "let me think"
    assert "reasoning" not in message(record.choice)
    assert record.trained == [[10, 11, 12, 13, 2]]


@pytest.mark.case(14)
async def test_reasoning_of_llamacpp_in_a_made_stream(tmp_path):
    tokens = spelt([t for t in THOUGHT if t.delta], "reasoning_content")
    speaker = LlamaCpp(Speech([*tokens, Token(2, {}, text="")]))
    _, body = await ask_once(speaker, tmp_path, ASK_STREAM, engine="llamacpp")
    said = "".join(e["choices"][0]["delta"].get("reasoning_content") or "" for e in events(body))
    assert said == "let me think"
    assert message(told(tmp_path).choice)["reasoning_content"] == "let me think"


@pytest.mark.case(14)
@pytest.mark.parametrize("size", [0, 1])
async def test_both_spellings_at_once_are_one_reasoning(tmp_path, size):
    tokens = [Token(10, {"reasoning": "hm", "reasoning_content": "hm"}), Token(11, {"content": "4"}), Token(2, {})]
    speaker = Vllm(Speech(tokens), sizes=size)
    _, body = await ask_once(speaker, tmp_path, ASK_STREAM)
    assert body == direct(speaker, ASK_STREAM)
    assert message(told(tmp_path).choice)["reasoning_content"] == "hm"


@pytest.mark.case(14)
@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
async def test_reasoning_in_the_history_goes_up_as_the_client_spelt_it(tmp_path, key):
    turns = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", key: "let me think", "content": "4"},
        {"role": "user", "content": "sure?"},
    ]
    async with path_to(Vllm(text("yes")), tmp_path) as (engine, proxy):
        async with proxy.post(dumps({**ASK, "messages": turns})) as answer:
            assert answer.status == 200
    assert engine.heard[0].json["messages"] == turns
    assert json.loads(bytes(told(tmp_path).call.messages)) == turns


# 15


def late_prompt(at: int, prompt=(1, 3, 4), times: int = 1) -> bytes:
    """A stream whose prompt ids come in event `at`."""
    asked = direct(Vllm(text("he", "llo")), {**ASK_STREAM, **INSTRUMENTED, "stream_options": {"include_usage": True}})
    blocks = asked.split(b"\n\n")
    blocks[0] = blocks[0].replace(b',"prompt_token_ids":[1,3,4]', b"")
    for block in range(at, at + times):
        blocks[block] = blocks[block][:-1] + b',"prompt_token_ids":' + json.dumps(prompt).encode() + b"}"
    return b"\n\n".join(blocks)


@pytest.mark.case(15)
@pytest.mark.parametrize("at", [0, 1, 2, 3, 4], ids=["role", "first-token", "second", "last", "usage"])
@pytest.mark.parametrize("size", [0, 1])
async def test_prompt_ids_are_found_wherever_they_come(tmp_path, at, size):
    _, body = await ask_once(lambda _: stream(late_prompt(at), size), tmp_path, ASK_STREAM)
    assert all(event.get("prompt_token_ids") is None for event in events(body))
    record = told(tmp_path)
    assert record.call.prompt_tokens == 3
    assert record.trained == [[5, 6, 2]]


@pytest.mark.case(15)
@pytest.mark.parametrize("prompt", [None, []], ids=["null", "empty"])
async def test_prompt_ids_that_never_come_leave_the_call_untrained(tmp_path, prompt):
    _, body = await ask_once(lambda _: stream(late_prompt(1, prompt)), tmp_path, ASK_STREAM)
    assert body.endswith(DONE)
    record = told(tmp_path)
    assert "no_prompt_ids" in record.problems
    assert record.call.prompt is None
    assert record.choice.ids_grade is IdsGrade.NONE
    assert record.trained == [[]]
    assert record.accounting.masked == {"no_ids": 3}
    assert record.samples[0].turns[0].masked_reason is MaskedReason.NO_IDS


@pytest.mark.case(15)
@pytest.mark.parametrize("say", [lambda _: whole(direct(Vllm(text("he", "llo")), ASK))], ids=["nothing-at-all"])
async def test_an_engine_that_gives_no_ids_is_text(tmp_path, say):
    """Asked for ids it gives none: the answer passes, the call is not trained."""
    status, body = await ask_once(say, tmp_path, ASK)
    assert (status, body) == (200, direct(Vllm(text("he", "llo")), ASK))
    record = told(tmp_path)
    assert record.accounting.masked == {"no_ids": 3}
    assert message(record.choice)["content"] == "hello"


@pytest.mark.case(15)
async def test_prompt_ids_that_come_twice_must_agree(tmp_path):
    await ask_once(lambda _: stream(late_prompt(1, times=3)), tmp_path / "same", ASK_STREAM)
    assert told(tmp_path / "same").trained == [[5, 6, 2]]
    blocks = late_prompt(0).split(b"\n\n")
    blocks[2] = blocks[2][:-1] + b',"prompt_token_ids":[1,3,5]}'
    await ask_once(lambda _: stream(b"\n\n".join(blocks)), tmp_path / "other", ASK_STREAM)
    record = told(tmp_path / "other")
    assert "prompt_ids_conflict" in record.problems
    assert record.accounting.masked == {"evidence_rejected": 3}


# 20


@pytest.mark.case(20)
@pytest.mark.parametrize("engine_name", ["vllm", "llamacpp", "openai"])
@pytest.mark.parametrize("mode", list(UpstreamStream), ids=str)
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"stream_options": {"include_usage": True}}, True),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {}}, False),
        ({"stream_options": None}, False),
        ({}, False),
    ],
    ids=["true", "false", "empty", "null", "absent"],
)
async def test_the_usage_chunk_is_there_exactly_when_asked_for(tmp_path, engine_name, mode, options, wanted):
    for n in (1, 2):
        speaker = SPEAKERS[engine_name](*[text("he", "llo")] * n)
        ask = {**ASK_STREAM, **options, "n": n}
        _, body = await ask_once(speaker, tmp_path / str(n), ask, engine=engine_name, mode=mode)
        usages = [event["usage"] for event in events(body) if event.get("usage")]
        assert [usage["prompt_tokens"] for usage in usages] == [3] * wanted
        assert [event["choices"] for event in events(body) if event.get("usage")] == [[]] * wanted
        assert body.endswith(DONE)
        if mode is UpstreamStream.OFF:
            assert told(tmp_path / str(n)).call.usage.prompt_tokens == 3
