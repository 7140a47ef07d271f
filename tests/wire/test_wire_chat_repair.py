"""Tool arguments that are not JSON are made JSON upstream; nothing else moves."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchard_proxy.wire import chat


def body(arguments: Any, **rest: Any) -> bytes:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return json.dumps({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}], **rest}).encode()


def arguments_of(request: bytes) -> Any:
    return json.loads(request)["messages"][0]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    "bad",
    [
        '{"a": ',
        "{'a': 1}",
        "not json",
        '{"a": 1}}',
        '{"a": "\n"}',
        " ",
        "{",
        '{"a": 1,}',
        '{"a": NaN}',
        '{"a": -Infinity}',
        "é\u2028🦊",
        '"',
        "\\",
    ],
)
def test_malformed_arguments_are_wrapped(bad: str) -> None:
    request = body(bad, temperature=0.000071)
    fixed = chat.repair_tool_arguments(request)
    assert fixed is not None
    assert json.loads(arguments_of(fixed)) == {"_malformed": bad}
    assert chat.repair_tool_arguments(fixed) is None
    before, after = request.split(json.dumps(bad).encode(), 1)
    assert fixed.startswith(before)
    assert fixed.endswith(after)


@pytest.mark.parametrize("good", ["", "{}", '{"a": 1}', "[]", "null", ' {"a":1} ', {"a": 1}, None, 5, '"x"'])
def test_good_arguments_stay(good: Any) -> None:
    assert chat.repair_tool_arguments(body(good)) is None


def test_only_the_bad_one_changes() -> None:
    request = (
        b'{ "messages": [ {"role":"user","content":"\\"arguments\\": {"},\n'
        b' {"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f","arguments":"{\\"x\\":0.10}"}},'
        b'{"id":"2","function":{"name":"f","arguments":"{\\"x\\":"}}]},'
        b'{"role":"assistant","function_call":{"name":"f","arguments":"oops"}} ], "tools": [{"arguments":"{"}] }'
    )
    fixed = chat.repair_tool_arguments(request)
    assert fixed == request.replace(b'"{\\"x\\":"', b'"{\\"_malformed\\":\\"{\\\\\\"x\\\\\\":\\"}"').replace(
        b'"oops"', b'"{\\"_malformed\\":\\"oops\\"}"'
    )


@pytest.mark.parametrize(
    "request_",
    [
        b"",
        b"null",
        b'{"arguments":"{"}',
        b'{"messages":"arguments"}',
        b'{"messages":{"tool_calls":[{"function":{"arguments":"{}"}}]}}',
        b'{"messages":[1,null,{"tool_calls":"arguments"},{"tool_calls":[1,{"function":null}]}]}',
        b'{"messages":[{"tool_calls":[{"function":{"arguments":',
    ],
)
def test_odd_requests(request_: bytes) -> None:
    assert chat.repair_tool_arguments(request_) is None


def test_beside_odd_messages_and_nan() -> None:
    request = b'{"t":NaN,"messages":[1,{"tool_calls":[5,{"function":{"arguments":"{"}}]}]}'
    fixed = chat.repair_tool_arguments(request)
    assert fixed == request.replace(b'"{"', b'"{\\"_malformed\\":\\"{\\"}"')


def test_lone_surrogates() -> None:
    fixed = chat.repair_tool_arguments(b'{"messages":[{"tool_calls":[{"function":{"arguments":"{\\ud800"}}]}]}')
    assert fixed is not None
    assert json.loads(arguments_of(fixed)) == {"_malformed": "{\ud800"}


@given(st.text())
@settings(deadline=None)
def test_any_text_ends_as_json_or_empty(text: str) -> None:
    request = body(text)
    fixed = chat.repair_tool_arguments(request) or request
    value = arguments_of(fixed)
    assert value == text or json.loads(value) == {"_malformed": text}
    assert value == "" or json.loads(value) is not NotImplemented
