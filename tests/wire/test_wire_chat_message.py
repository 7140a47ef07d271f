"""One spelling per message, and what counts as the same turn."""

from typing import Any

import pytest

from orchard_proxy.wire import chat

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"content": None, "tool_calls": [CALL]}, {"content": "", "tool_calls": [CALL]}),
        ({"content": None, "tool_calls": [CALL]}, {"tool_calls": [CALL]}),
        ({"content": "", "tool_calls": [CALL]}, {"content": [], "tool_calls": [CALL]}),
        ({"content": None}, {"content": ""}),
        ({"content": "a", "tool_calls": []}, {"content": "a", "tool_calls": None}),
        ({"content": "a", "refusal": None, "annotations": [], "audio": None}, {"content": "a"}),
        ({"content": "a", "refusal": "x", "annotations": [{"y": 1}], "z": float("nan")}, {"content": "a"}),
        ({"content": "a", "reasoning": "r"}, {"content": "a", "reasoning_content": "r"}),
        ({"content": "a", "reasoning": "r", "reasoning_content": "r"}, {"content": "a", "reasoning_content": "r"}),
        ({"content": "a", "reasoning": ""}, {"content": "a"}),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"content": "ab"}),
        ({"content": "a", "function_call": None}, {"content": "a"}),
    ],
    ids=str,
)
def test_same_turn(a: dict[str, Any], b: dict[str, Any]) -> None:
    a, b = {"role": "assistant", **a}, {**b, "role": "assistant"}
    assert chat.identity(a) == chat.identity(b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"content": "a"}, {"content": "b"}),
        ({"content": ""}, {"content": "", "tool_calls": [CALL]}),
        ({"content": "a", "reasoning": "r"}, {"content": "a", "reasoning": "s"}),
        ({"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}),
        ({"role": "tool", "content": "a", "tool_call_id": "1"}, {"role": "tool", "content": "a", "tool_call_id": "2"}),
        (
            {"content": [{"type": "image_url", "image_url": {"url": "a"}}]},
            {"content": [{"type": "image_url", "image_url": {"url": "b"}}]},
        ),
        (
            {"tool_calls": [CALL]},
            {"tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"a":2}'}}]},
        ),
    ],
    ids=str,
)
def test_other_turn(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert chat.identity(a) != chat.identity(b)


def test_canonical() -> None:
    message = {"content": "", "reasoning": "r", "tool_calls": [{**CALL, "extra": 1}], "audio": None}
    assert chat.canonical(message) == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "r",
        "tool_calls": [CALL],
    }


@pytest.mark.parametrize("odd", [None, [], "x", 5, {"tool_calls": 7}, {"tool_calls": ["x", {}]}, {"content": {"a": 1}}])
def test_odd_messages_never_raise(odd: Any) -> None:
    chat.identity(odd)
    assert chat.canonical(odd)["role"] == "assistant"


def test_arguments_as_an_object_become_text() -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": {"a": 1}}}
    assert chat.canonical({"tool_calls": [call]})["tool_calls"] == [CALL]
