"""Streams made from whole answers: what the engine's own stream says, where it can be known to the byte."""

import json
from typing import Any

import pytest
from fakes import twins

from orchard_proxy.wire import chat, jsonbytes, sse

TWINS = {(engine, twin.name): twin for engine in ("vllm", "llamacpp") for twin in twins.load(engine)}
STREAM = chat.decode(b'{"stream":true}')
USAGE = chat.decode(b'{"stream":true,"stream_options":{"include_usage":true}}')


def masked(stream: bytes) -> bytes:
    return (
        twins.mask(stream)
        .replace(b'"cached_tokens":20', b'"cached_tokens":0')
        .replace(b'"cached_tokens":23', b'"cached_tokens":0')
    )


def chunks(stream: list[bytes]) -> list[dict[str, Any]]:
    assert stream[-1] == b"data: [DONE]\n\n"
    return [json.loads(event.removeprefix(b"data: ")) for event in stream[:-1]]


def folded(stream: list[bytes]) -> chat.Answer:
    fold = chat.StreamFold()
    for chunk in chunks(stream):
        fold.add(chunk)
    return fold.answer()


@pytest.mark.parametrize(
    ("engine", "whole", "stream"),
    [
        ("llamacpp", "a_chat", "b_stream"),
        ("llamacpp", "a_chat", "c_stream_usage"),
        ("llamacpp", "k2_emoji", "k_emoji_stream"),
        ("llamacpp", "k2_emoji", "k4_emoji_usage"),
        ("llamacpp", "i_max1", "i2_max1_stream"),
        ("llamacpp", "h_stop", "h2_stop_stream"),
        ("llamacpp", "g_logprobs", "g2_logprobs_stream"),
        ("vllm", "a_chat", "b_stream"),
        ("vllm", "a_chat", "c_stream_usage"),
        ("vllm", "k2_emoji", "k_emoji_stream"),
        ("vllm", "i_max1", "i2_max1_stream"),
        ("vllm", "g_logprobs", "g2_logprobs_stream"),
    ],
)
def test_equals_the_engines_own_stream_byte_for_byte(engine: str, whole: str, stream: str) -> None:
    answer, expected = TWINS[engine, whole], TWINS[engine, stream]
    request = chat.decode(expected.plain_request)
    made = b"".join(chat.synthesise(answer.plain_body, request, source=answer.instr_body))
    assert masked(made) == masked(expected.plain_body)


WHOLE = [
    key for key, twin in TWINS.items() if twin.status == 200 and not twin.is_stream and twin.plain_body.startswith(b"{")
]


@pytest.mark.parametrize("include_usage", [False, True], ids=["", "usage"])
@pytest.mark.parametrize("key", WHOLE, ids="-".join)
def test_folds_to_the_whole_answer(key: tuple[str, str], include_usage: bool) -> None:
    body = TWINS[key].plain_body
    request = USAGE if include_usage else STREAM
    whole = chat.read_answer(jsonbytes.loads(body))
    for source in (None, TWINS[key].instr_body):
        stream = chat.synthesise(body, request, source=source)
        answer = folded(stream)
        assert answer.choices == whole.choices
        assert (answer.model, answer.system_fingerprint) == (whole.model, whole.system_fingerprint)
        assert (answer.usage == whole.usage) == include_usage
        assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks(stream))
        assert [c["choices"] == [] for c in chunks(stream)].count(True) == include_usage


def test_without_entries_the_text_is_one_piece() -> None:
    body = TWINS["llamacpp", "d2_n2"].plain_body
    got = [c["choices"][0] for c in chunks(chat.synthesise(body, STREAM))]
    assert [(c["index"], list(c["delta"]), c["finish_reason"]) for c in got] == [
        (0, ["role", "content"], None),
        (0, ["content"], None),
        (0, [], "length"),
        (1, ["role", "content"], None),
        (1, ["content"], None),
        (1, [], "length"),
    ]


def test_a_real_tool_call() -> None:
    body = TWINS["llamacpp", "e5_real_tool_call"].plain_body
    _, call, end = (c["choices"][0] for c in chunks(chat.synthesise(body, STREAM)))
    (fragment,) = call["delta"]["tool_calls"]
    assert list(fragment) == ["index", "id", "type", "function"]
    assert fragment["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert (end["delta"], end["finish_reason"]) == ({}, "tool_calls")


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_keeps_its_spelling_and_comes_first(key: str) -> None:
    message = {"role": "assistant", "content": "a", key: "think", "tool_calls": [], "refusal": None}
    body = json.dumps({"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
    deltas = [c["choices"][0]["delta"] for c in chunks(chat.synthesise(body, STREAM))]
    assert deltas == [{"role": "assistant", "content": ""}, {key: "think"}, {"content": "a"}, {}]


def test_values_keep_their_spelling() -> None:
    body = (
        b'{"id":"x","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant",'
        b'"content":"\\u00e9\\/"},"logprobs":null,"finish_reason":"stop","score":0.000071}],"usage":{"cost":1.50e-05}}'
    )
    stream = b"".join(chat.synthesise(body, USAGE))
    assert b'"delta":{"content":"\\u00e9\\/"}' in stream
    assert b'"finish_reason":"stop","score":0.000071}' in stream
    assert b'"usage":{"cost":1.50e-05}' in stream
    assert stream.count(b"0.000071") == 1


def test_pretty_printed_answers_make_one_line_events() -> None:
    answer = json.loads(TWINS["vllm", "g_logprobs"].plain_body)
    stream = chat.synthesise(json.dumps(answer, indent=2).encode(), USAGE)
    assert all(event.count(b"\n") == 2 for event in stream)
    assert folded(stream).choices == chat.read_answer(answer).choices


def test_entries_beyond_the_text_ride_along() -> None:
    twin = TWINS["vllm", "g_logprobs"]
    got = chunks(chat.synthesise(twin.plain_body, STREAM))
    entries = [e for c in got for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert entries == json.loads(twin.plain_body)["choices"][0]["logprobs"]["content"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"error":{"message":"x"}}',
        b'{"choices":null}',
        b'{"choices":[]}',
        b'{"choices":[null,5]}',
        b'{"choices":[{"message":null}]}',
        b'{"choices":[{"message":{"content":5,"tool_calls":[1,{}]},"logprobs":{"content":"x"},"token_ids":"y"}]}',
        b'{"choices":[{"message":{"content":"\xff"},"logprobs":{"content":[{"logprob":NaN}]}}]}',
        b'{"choices":[{"message":{"content":"\\ud800"},"logprobs":{"content":[{"token":"x"}]}}],"x":NaN}',
    ],
)
def test_odd_answers_never_raise(body: bytes) -> None:
    stream = chat.synthesise(body, USAGE, source=body)
    assert stream[-1] == b"data: [DONE]\n\n"
    parser = sse.SseParser()
    for event in parser.feed(b"".join(stream[:-1])) + parser.close():
        assert event.data is not None
        jsonbytes.loads(event.data)


def test_an_error_body_becomes_an_error_event() -> None:
    assert folded(chat.synthesise(b'{"error":{"message":"x"}}', STREAM)).error is not None
    assert folded(chat.synthesise(b"<html>", STREAM)).error is not None
