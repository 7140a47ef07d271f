"""The parts of a choice: which delta carries which entries and ids."""

import json
from typing import Any

import pytest

from orchard_proxy.wire import jsonbytes
from orchard_proxy.wire.chat_parts import entries_of, parts_of


def entry(token: str) -> dict[str, Any]:
    return {"token": token, "bytes": list(token.encode()), "logprob": -0.000071, "top_logprobs": []}


def parts(message: dict[str, Any], *, vllm: bool = False, **choice: Any) -> list[tuple[Any, Any, Any]]:
    raw = jsonbytes.members(json.dumps({"index": 0, "message": message, **choice}).encode())
    assert raw is not None
    found = parts_of(raw, entries_of(raw), vllm=vllm)

    def read(value: Any) -> Any:
        return None if value is None else json.loads(bytes(value))

    return [(read(p.delta), read(p.logprobs), read(p.token_ids)) for p in found]


def tokens(logprobs: Any) -> list[str]:
    return [] if logprobs is None else [item["token"] for item in logprobs["content"]]


@pytest.mark.parametrize("vllm", [False, True])
def test_entries_and_ids_ride_with_their_text(vllm: bool) -> None:
    logprobs = {"content": [entry("Hi"), entry(" you"), entry("")], "refusal": None}
    got = parts({"content": "Hi you"}, vllm=vllm, logprobs=logprobs, token_ids=[5, 6, 2])
    assert [(d, tokens(lp), ids) for d, lp, ids in got] == [
        ({"content": "Hi"}, ["Hi"], [5]),
        ({"content": " you"}, [" you"], [6]),
        ({}, [""], [2]),
    ]
    assert got[0][1]["refusal"] is None


def test_what_cannot_be_aligned_rides_on_the_first_delta() -> None:
    logprobs = {"content": [entry("<think>"), entry("x")]}
    got = parts({"content": "Hi", "reasoning": "x"}, logprobs=logprobs, token_ids=[1, 2])
    assert [(d, tokens(lp), ids) for d, lp, ids in got] == [
        ({"reasoning": "x"}, ["<think>", "x"], [1, 2]),
        ({"content": "Hi"}, [], None),
        ({}, [], None),
    ]


def test_more_ids_than_entries_are_not_split() -> None:
    got = parts({"content": "Hi you"}, logprobs={"content": [entry("Hi"), entry(" you")]}, token_ids=[1, 2, 3])
    assert [ids for _, _, ids in got] == [[1, 2, 3], None, None]
    assert [tokens(lp) for _, lp, _ in got] == [["Hi", " you"], [], []]


def test_an_empty_message_has_one_part_with_everything() -> None:
    assert [(d, tokens(lp)) for d, lp, _ in parts({"content": ""}, logprobs={"content": [entry("")]})] == [({}, [""])]
    assert parts({}) == [({}, None, None)]


def test_refusal_logprobs_are_said_once() -> None:
    logprobs = {"content": [entry("a"), entry("b")], "refusal": [entry("r")]}
    got = parts({"content": "ab"}, logprobs=logprobs)
    assert [lp and lp["refusal"] and len(lp["refusal"]) for _, lp, _ in got] == [1, None, None]
    alone = parts({"refusal": "r"}, logprobs={"content": None, "refusal": [entry("r")]})
    assert [lp and lp["refusal"][0]["token"] for _, lp, _ in alone] == ["r", None]


def test_order_and_tool_calls() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}, "id": "a", "extra": 1}
    message = {"tool_calls": [call, {**call, "id": "b"}], "content": "x", "reasoning_content": "r", "annotations": [1]}
    deltas = [d for d, _, _ in parts(message)]
    assert [next(iter(d), "") for d in deltas] == [
        "reasoning_content",
        "content",
        "tool_calls",
        "tool_calls",
        "annotations",
        "",
    ]
    assert list(deltas[2]["tool_calls"][0]) == ["index", "id", "type", "function", "extra"]
    assert [d["tool_calls"][0]["index"] for d in deltas[2:4]] == [0, 1]
