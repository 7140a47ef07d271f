"""What a whole answer of llama.cpp has and its stream has not: the text it was made to begin with, and full reports.

A request whose last message is the assistant's own makes the engine go on from there. The whole answer then repeats
that text and the stream holds only what follows it. The invariant: nothing is cut that was sampled.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import Raw

from orchard_proxy.wire import jsonbytes
from orchard_proxy.wire.chat_message import text_of
from orchard_proxy.wire.chat_request import ChatRequest

Members = dict[str, Raw]

_NULL = Raw(b"null")
_IN_STREAM: dict[str, jsonbytes.Change] = {
    "content": b'""',
    "tokens": b"[]",
    "completion_probabilities": None,
    "generation_settings": jsonbytes.each({"stream": b"true"}),
}


def without_prefill(choices: Sequence[Members], report: Raw | None, request: ChatRequest) -> list[Members]:
    """Return the choices without the text that the request put into the assistant's mouth.

    `report` is the engine's `__verbose`: what it sampled for one of the choices, before any parsing.
    """
    begun = _last_message(request)
    if begun.get("role") != "assistant":
        return list(choices)
    texts = [_content(choice) for choice in choices]
    given = _given(choices, texts, report) or text_of(begun.get("content"))
    return [
        _saying(choice, text.removeprefix(given)) if text.startswith(given) else choice
        for choice, text in zip(choices, texts, strict=True)
    ]


def in_stream(report: Raw) -> Raw:
    """Return a report as it ends a stream, where text and ids have been sent before it."""
    return Raw(jsonbytes.edit(bytes(report), _IN_STREAM))


def reported_index(report: Raw) -> int:
    """Return the number of the choice that a report is of."""
    index = _value((jsonbytes.members(bytes(report)) or {}).get("index", _NULL))
    return index if type(index) is int else 0


def _given(choices: Sequence[Members], texts: Sequence[str], report: Raw | None) -> str:
    """Return what stands before the sampled text in the choice of the report; empty where that cannot be told."""
    sampled = _value((jsonbytes.members(bytes(report or _NULL)) or {}).get("content", _NULL))
    if report is None or not isinstance(sampled, str):
        return ""
    for choice, text in zip(choices, texts, strict=True):
        if _value(choice["index"]) == reported_index(report) and text.endswith(sampled):
            return text.removesuffix(sampled)
    return ""


def _last_message(request: ChatRequest) -> dict[str, Any]:
    messages = jsonbytes.elements(bytes(request.members.get("messages", _NULL)))
    last = _value(messages[-1]) if messages else None
    return last if isinstance(last, dict) else {}


def _content(choice: Members) -> str:
    message = _value(choice["message"])
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, str) else ""


def _saying(choice: Members, text: str) -> Members:
    message = jsonbytes.edit(bytes(choice["message"]), {"content": jsonbytes.dumps(text)})
    return {**choice, "message": Raw(message)}


def _value(raw: Raw) -> Any:
    try:
        return jsonbytes.loads(bytes(raw))
    except ValueError:
        return None
