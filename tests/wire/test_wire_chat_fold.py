"""Streams and whole answers read to the same record, on captured bodies and on odd ones."""

import json
from typing import Any

import pytest
from fakes import twins
from msgspec import Raw

from orchard_proxy.schema.records import Usage
from orchard_proxy.wire import chat, jsonbytes, sse

TWINS = {(engine, twin.name): twin for engine in ("vllm", "llamacpp") for twin in twins.load(engine)}


def plain(engine: str, name: str) -> bytes:
    return TWINS[engine, name].plain_body


def fold(stream: bytes) -> chat.Answer:
    parser, folded = sse.SseParser(), chat.StreamFold()
    for event in parser.feed(stream) + parser.close():
        if event.data is not None and not sse.is_done(event):
            folded.add(jsonbytes.loads(event.data))
    return folded.answer()


def said(answer: chat.Answer) -> list[Any]:
    return [(c.index, json.loads(bytes(c.message)), c.finish_reason, c.stop_reason) for c in answer.choices]


def chunk(*choices: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"choices": list(choices), **rest}


def delta(index: int = 0, **members: Any) -> dict[str, Any]:
    return {"index": index, "delta": members, "finish_reason": None}


def end(index: int = 0, reason: str = "stop", **rest: Any) -> dict[str, Any]:
    return {"index": index, "delta": {}, "finish_reason": reason, **rest}


def folded(*chunks: Any) -> chat.Answer:
    fold_ = chat.StreamFold()
    for item in chunks:
        fold_.add(item)
    return fold_.answer()


@pytest.mark.parametrize(
    ("engine", "whole", "stream"),
    [
        ("vllm", "a_chat", "b_stream"),
        ("vllm", "g_logprobs", "g2_logprobs_stream"),
        ("vllm", "k2_emoji", "k_emoji_stream"),
        ("llamacpp", "a_chat", "b_stream"),
        ("llamacpp", "g_logprobs", "g2_logprobs_stream"),
        ("llamacpp", "k2_emoji", "k_emoji_stream"),
        ("llamacpp", "e5_real_tool_call", "v5_verbose_tool_call_stream"),
    ],
)
def test_a_stream_says_what_the_whole_answer_says(engine: str, whole: str, stream: str) -> None:
    a = chat.read_answer(jsonbytes.loads(plain(engine, whole)))
    b = fold(plain(engine, stream))

    def without_ids(answer: chat.Answer) -> list[Any]:
        found = said(answer)
        for _, message, _, _ in found:
            for call in message.get("tool_calls", ()):
                assert call.pop("id")
        return found

    assert without_ids(a) == without_ids(b)
    assert a.finished
    assert b.finished
    assert (a.model, a.system_fingerprint) == (b.model, b.system_fingerprint)


def test_usage_of_a_stream() -> None:
    answer = fold(plain("llamacpp", "c_stream_usage"))
    assert answer.usage == Usage(prompt_tokens=21, completion_tokens=8)


@pytest.mark.parametrize("name", ["vllm", "llamacpp"])
def test_two_choices_interleaved(name: str) -> None:
    answer = fold(plain(name, "d_stream_n2"))
    assert [c.index for c in answer.choices] == [0, 1]
    assert all(c.finish_reason == "length" for c in answer.choices)
    texts = [json.loads(bytes(c.message))["content"] for c in answer.choices]
    assert all(len(text) > 20 for text in texts)
    assert texts[0] != texts[1]


def test_tool_call_of_vllm() -> None:
    ((_, message, reason, _),) = said(fold(plain("vllm", "f4_tools_required_stream_usage")))
    assert reason == "tool_calls"
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"]["description"]


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_in_either_spelling(key: str) -> None:
    answer = folded(
        chunk(delta(role="assistant", content="")), chunk(delta(**{key: "th"})), chunk(delta(**{key: "ink"}))
    )
    whole = chat.read_answer({"choices": [{"index": 0, "message": {"role": "assistant", "content": "", key: "think"}}]})
    expected = {"role": "assistant", "content": "", "reasoning_content": "think"}
    assert said(answer) == said(whole) == [(0, expected, None, None)]


def test_both_spellings_at_once_are_said_once() -> None:
    answer = folded(chunk(delta(reasoning="a", reasoning_content="a")))
    assert json.loads(bytes(answer.choices[0].message))["reasoning_content"] == "a"


def test_unicode_line_ends_in_content() -> None:
    content = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1eh"
    chunks = [json.dumps(chunk(delta(content=c)), ensure_ascii=False).encode() for c in content]
    answer = fold(b"".join(map(sse.encode, chunks)))
    assert json.loads(bytes(answer.choices[0].message))["content"] == content


def test_finish_and_stop_reason() -> None:
    answer = folded(chunk(delta(content="a")), chunk(end(stop_reason="</s>")), chunk(end(1, "length", stop_reason=2)))
    assert [(c.finish_reason, c.stop_reason) for c in answer.choices] == [("stop", '"</s>"'), ("length", "2")]
    assert answer.finished


def test_unfinished() -> None:
    fold_ = chat.StreamFold()
    assert not fold_.finished
    fold_.add(chunk(delta(0, content="a"), delta(1, content="b")))
    fold_.add(chunk(end(0)))
    assert not fold_.finished
    fold_.add(chunk({"index": 1, "delta": {}, "finish_reason": ""}))
    assert not fold_.finished
    fold_.add(chunk(end(1)))
    assert fold_.finished
    assert fold_.answer().finished
    assert not chat.Answer().finished


@pytest.mark.parametrize(
    "error",
    [{"error": {"message": "boom", "code": 500}}, {"error": "boom"}, {"object": "error", "message": "boom"}],
    ids=["openai", "text", "old vllm"],
)
def test_an_error_in_the_stream(error: dict[str, Any]) -> None:
    answer = folded(chunk(delta(content="a")), error)
    assert answer.error is not None
    assert b"boom" in bytes(answer.error)
    assert said(answer)[0][1]["content"] == "a"
    assert chat.read_answer(error).error == answer.error


def test_no_error() -> None:
    assert folded(chunk(delta(content="a"), error=None)).error is None


@pytest.mark.parametrize(
    "odd",
    [
        None,
        [],
        "x",
        {},
        {"choices": None},
        {"choices": "x"},
        {"choices": [None, 5, {}]},
        {"choices": [{"index": "0", "delta": None}]},
        {"choices": [{"index": 0, "delta": {"content": 5, "tool_calls": [None, {}, {"function": None}]}}]},
        {"choices": [{"index": 0, "message": "x", "finish_reason": 4}]},
        {"usage": 5, "model": 7},
        {"usage": {"prompt_tokens": -1, "completion_tokens": True}},
    ],
    ids=str,
)
def test_odd_chunks_and_bodies_never_raise(odd: Any) -> None:
    assert folded(odd).usage == Usage()
    answer = chat.read_answer(odd)
    assert answer.usage == Usage()
    assert all(isinstance(c.message, Raw) for c in answer.choices)


def test_legacy_function_call() -> None:
    answer = folded(
        chunk(delta(role="assistant", content=None)),
        chunk(delta(function_call={"name": "f", "arguments": ""})),
        chunk(delta(function_call={"arguments": "{}"})),
        chunk(end(0, "function_call")),
    )
    expected = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    assert said(answer) == [(0, expected, "function_call", None)]


def test_refusal_and_content_parts() -> None:
    answer = folded(chunk(delta(refusal="n")), chunk(delta(refusal="o", content=[{"type": "text", "text": "x"}])))
    assert said(answer)[0][1] == {"role": "assistant", "content": "x", "refusal": "no"}
