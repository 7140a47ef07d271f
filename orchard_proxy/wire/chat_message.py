"""One spelling of a message, so that the same turn is the same however an engine or a harness writes it.

Not what is stored of a request: that stays as the client sent it. Two messages are the same turn iff `identity` agrees.
"""

from typing import Any

from orchard_proxy.wire import jsonbytes

REASONING = ("reasoning_content", "reasoning")
"""Spellings of the reasoning text; the first is the canonical one."""

_IDENTITY = ("role", "content", "reasoning_content", "tool_calls", "function_call", "tool_call_id")


def canonical(message: Any) -> dict[str, Any]:
    """Return {role, content, reasoning_content?, tool_calls?, function_call?, refusal?, name?, tool_call_id?}.

    Absent, null and empty content are one: null beside tool calls, else the empty string. Unknown members are left out.
    """
    source: dict[str, Any] = message if isinstance(message, dict) else {}
    calls = tool_calls(source.get("tool_calls"))
    legacy = source.get("function_call")
    content = _content(source.get("content"))
    if not content:
        content = None if calls or legacy else ""
    out: dict[str, Any] = {"role": source.get("role") or "assistant", "content": content}
    reasoning = reasoning_of(source)
    if reasoning:
        out["reasoning_content"] = reasoning
    if calls:
        out["tool_calls"] = calls
    for key in ("function_call", "refusal", "name", "tool_call_id"):
        if source.get(key):
            out[key] = source[key]
    return out


def identity(message: Any) -> bytes:
    """Return bytes that are equal iff two messages are the same turn: who, what text, what reasoning, what calls."""
    said = canonical(message)
    return jsonbytes.dumps([said.get(key) for key in _IDENTITY])


def reasoning_of(source: dict[str, Any]) -> str:
    """Return the reasoning text of a message or a delta, whichever spelling; engines that send both send it twice."""
    for key in REASONING:
        value = source.get(key)
        if isinstance(value, str) and value:
            return value
    return ""


def text_of(content: Any) -> str:
    """Return the text of a content: the string itself, or its text parts joined."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str))


def tool_calls(raw: Any) -> list[dict[str, Any]]:
    """Return the calls as {id, type, function: {name, arguments}}, arguments a string as the model wrote it."""
    return [_call(item) for item in raw if isinstance(item, dict)] if isinstance(raw, list) else []


def arguments_text(value: Any) -> str:
    """Return tool arguments as text; some engines send them as an object."""
    if isinstance(value, str):
        return value
    return "" if value is None else jsonbytes.dumps(value).decode()


def _content(content: Any) -> Any:
    """Return content as text; content with parts that are no text (images) stays a list."""
    if isinstance(content, list) and not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return content
    return content if isinstance(content, dict) else text_of(content)


def _call(item: dict[str, Any]) -> dict[str, Any]:
    found = item.get("function")
    function: dict[str, Any] = found if isinstance(found, dict) else {}
    return {
        "id": item.get("id"),
        "type": item.get("type") or "function",
        "function": {"name": function.get("name"), "arguments": arguments_text(function.get("arguments"))},
    }
