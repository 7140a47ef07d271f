"""Streams of answers that begin with the request's own words; real ones: test_engines_real_llamacpp."""

import json
from typing import Any

import pytest

from orchard_proxy.wire import chat


def streamed(content: Any, begun: Any, report: Any = None, role: str = "assistant", **more: Any) -> list[Any]:
    """Return the deltas made of a llama.cpp answer to a request that ends with `begun`."""
    asked = {"stream": True, "messages": [{"role": "user", "content": "hi"}, {"role": role, "content": begun}]}
    contents = content if isinstance(content, list) else [content]
    choices = [{"index": i, "message": {"role": "assistant", "content": c}} for i, c in enumerate(contents)]
    body = {"choices": choices, "id": "x", **more}
    source = body | ({} if report is None else {"__verbose": report})
    request = chat.decode(json.dumps(asked).encode())
    events = chat.synthesise(json.dumps(body).encode(), request, source=json.dumps(source).encode())
    made = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
    return [c["choices"][0]["delta"]["content"] for c in made if c["choices"][0]["delta"].get("content")]


@pytest.mark.parametrize(
    ("content", "begun", "report", "expected"),
    [
        ("The capital", "The", {"content": " capital"}, [" capital"]),
        ("The capital", "The", None, [" capital"]),
        ("The capital", [{"type": "text", "text": "The"}], None, [" capital"]),
        ("a\nb c", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], {"content": " c"}, [" c"]),
        ("The", "The", {"content": ""}, []),
        ("haha", "ha", {"content": "ha"}, ["ha"]),
        ("capital", "The", {"content": "capital"}, ["capital"]),
        ("other", "The", {"content": "parsed away"}, ["other"]),
        ("other", "The", None, ["other"]),
        ("The", "", {"content": "The"}, ["The"]),
        ("The", None, None, ["The"]),
        ("The", 5, {"content": 5}, ["The"]),
        (["The a", "The b"], "The", {"index": 0, "content": " a"}, [" a", " b"]),
        (["The a", "The b"], "The", {"index": 1, "content": " b"}, [" a", " b"]),
        (None, "The", {"content": ""}, []),
    ],
)
def test_the_stream_holds_what_was_sampled(content: Any, begun: Any, report: Any, expected: list[str]) -> None:
    assert streamed(content, begun, report) == expected


def test_words_of_the_user_are_not_cut() -> None:
    assert streamed("The capital", "The", {"content": "The capital"}, role="user") == ["The capital"]


@pytest.mark.parametrize("messages", [b"5", b"[]", b"[5]", b"null", b'[{"role":"assistant"}]', b'[{"role":[]}]'])
def test_odd_requests_never_raise(messages: bytes) -> None:
    request = chat.decode(b'{"stream":true,"messages":%b}' % messages)
    body = b'{"choices":[{"message":{"content":"a"}}],"__verbose":5}'
    assert chat.synthesise(body, request, source=body)[-1] == b"data: [DONE]\n\n"


def test_a_report_rides_on_the_last_chunk_of_its_choice() -> None:
    choices = [{"index": i, "message": {"content": "a"}, "finish_reason": "stop"} for i in (0, 1)]
    report = {"index": 0, "content": "a", "tokens": [5], "generation_settings": {"stream": False}, "x": 1.50}
    body = json.dumps({"choices": choices, "id": "x", "__verbose": report, "timings": {}}).encode()
    for options in (b"", b',"stream_options":{"include_usage":true}'):
        events = chat.synthesise(body, chat.decode(b'{"stream":true%b}' % options))
        (one,) = [json.loads(event.removeprefix(b"data: ")) for event in events if b"__verbose" in event]
        assert (one["choices"][0]["index"], one["choices"][0]["finish_reason"]) == (0, "stop")
        assert one["__verbose"] == report | {"content": "", "tokens": [], "generation_settings": {"stream": True}}
