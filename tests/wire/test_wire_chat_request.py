"""Reading a request: what it asks for, whatever the types, without a crash and without touching its messages."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from orchard_proxy.wire import chat


def decode(**members: Any) -> chat.ChatRequest:
    return chat.decode(json.dumps({"messages": [], **members}).encode())


def test_a_usual_request() -> None:
    body = (
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"n":2,"temperature":0.70,'
        b'"logprobs":true,"top_logprobs":3,"stream_options":{"include_usage":true},"tools":[{"type":"function"}]}'
    )
    request = chat.decode(body)
    assert request.ok
    assert request.body is body
    assert (request.model, request.stream, request.n) == ("m", True, 2)
    assert (request.include_usage, request.wants_logprobs, request.top_logprobs) == (True, True, 3)
    assert request.has_tools
    assert request.mistyped == frozenset()
    assert bytes(chat.messages(request)) == b'[{"role":"user","content":"hi"}]'
    assert bytes(chat.tools(request)) == b'[{"type":"function"}]'
    assert bytes(chat.sampling(request)) == b'{"n":2,"temperature":0.70}'


def test_defaults() -> None:
    request = chat.decode(b"{}")
    assert request.ok
    assert (request.model, request.stream, request.n, request.include_usage) == (None, False, 1, False)
    assert (request.wants_logprobs, request.top_logprobs, request.has_tools) == (False, None, False)
    assert bytes(chat.messages(request)) == b"[]"
    assert bytes(chat.tools(request)) == b"null"
    assert bytes(chat.sampling(request)) == b"{}"


@pytest.mark.parametrize(
    ("members", "field", "value", "mistyped"),
    [
        ({"stream": "yes"}, "stream", False, True),
        ({"stream": 1}, "stream", False, True),
        ({"stream": None}, "stream", False, False),
        ({"n": 0}, "n", 0, False),
        ({"n": -3}, "n", -3, False),
        ({"n": None}, "n", 1, False),
        ({"n": "2"}, "n", 1, True),
        ({"n": True}, "n", 1, True),
        ({"n": 1.5}, "n", 1, True),
        ({"logprobs": "abc"}, "wants_logprobs", False, True),
        ({"logprobs": 5}, "wants_logprobs", False, True),
        ({"logprobs": None}, "wants_logprobs", False, False),
        ({"top_logprobs": "many"}, "top_logprobs", None, True),
        ({"model": 7}, "model", None, True),
        ({"stream_options": []}, "include_usage", False, True),
        ({"stream_options": {"include_usage": "x"}}, "include_usage", False, False),
        ({"tools": {}}, "has_tools", False, False),
        ({"tools": []}, "has_tools", False, False),
        ({"tools": None}, "has_tools", False, False),
        ({"functions": [{}]}, "has_tools", True, False),
    ],
    ids=str,
)
def test_odd_types(members: dict[str, Any], field: str, value: Any, mistyped: bool) -> None:
    request = decode(**members)
    assert request.ok
    assert getattr(request, field) == value
    assert bool(request.mistyped) == mistyped
    chat.sampling(request), chat.messages(request), chat.tools(request)


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b'"x"', b"{", b'{"a":}', b'{"stream":tru}', b"\xff", b"[" * 100_000, b'{"a":1}x']
)
def test_what_is_no_object_is_not_ok(body: bytes) -> None:
    request = chat.decode(body)
    assert not request.ok
    assert request.body == body
    assert request.members == {}
    assert bytes(chat.messages(request)) == b"[]"


@given(st.binary(max_size=60) | st.binary(max_size=30).map(lambda noise: b'{"messages":' + noise + b',"n":1}'))
@settings(deadline=None)
def test_noise_never_raises(body: bytes) -> None:
    request = chat.decode(body)
    json.loads(bytes(chat.messages(request)))
    json.loads(bytes(chat.sampling(request)))


def test_beyond_strict_json() -> None:
    request = chat.decode(b'{"temperature":NaN,"messages":[{"x":Infinity,"y":"\\ud800"}],"stream":true}')
    assert request.ok
    assert request.stream
    assert bytes(chat.sampling(request)) == b'{"temperature":null}'
    assert json.loads(bytes(chat.messages(request))) == [{"x": None, "y": "\ud800"}]


def test_bytes_that_are_not_utf8() -> None:
    request = chat.decode(b'{"messages":[{"content":"\xff"}]}')
    assert json.loads(bytes(chat.messages(request))) == [{"content": "\ufffd"}]


def test_spelling_of_messages_stays() -> None:
    spelled = b'[ {"role":"user", "content":"\\u00e9", "weight":0.000071} ]'
    request = chat.decode(b'{ "messages": ' + spelled + b" }")
    assert chat.messages(request) == Raw(spelled)


def test_members_are_not_parsed() -> None:
    big = b'{"messages":[' + b",".join([b'{"role":"user","content":"x"}'] * 1000) + b"]}"
    assert all(isinstance(value, Raw) for value in chat.decode(big).members.values())


def test_has_and_value() -> None:
    request = decode(top_logprobs=None, stop=["a"])
    assert not request.has("top_logprobs")
    assert not request.has("nothing")
    assert request.has("stop")
    assert request.value("stop") == ["a"]
    assert request.value("nothing") is None
    assert request.value("top_logprobs") is None
