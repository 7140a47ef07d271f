"""Histories with tool arguments that are not JSON, made sendable.

A model that was cut, or that wrote nonsense, leaves arguments such as `{"a": ` in the harness's history; engines then
refuse every later call of the rollout. The upstream copy gets `{"_malformed": "<raw>"}` in their place; everything
else stays byte for byte, and the record keeps what the client sent.
"""

import json

import msgspec

from orchard_proxy.wire import jsonbytes
from orchard_proxy.wire.jsonbytes import Change


def repair_tool_arguments(body: bytes) -> bytes | None:
    """Return the request body with valid tool arguments, or None when there is nothing to repair."""
    if b'"arguments"' not in body:
        return None
    fixed = jsonbytes.edit(body, {"messages": lambda raw: jsonbytes.map_elements(raw, _message)})
    return None if fixed == body else fixed


def _message(raw: bytes) -> bytes:
    return jsonbytes.edit(raw, _MESSAGE) if b'"arguments"' in raw else raw


def _arguments(raw: bytes) -> bytes:
    """Repair the value of one `arguments` member."""
    if not raw.startswith(b'"') or raw == b'""':
        return raw
    try:
        text = jsonbytes.loads(raw)
    except ValueError:
        return raw
    return raw if _is_json(text) else jsonbytes.dumps(jsonbytes.dumps({"_malformed": text}).decode())


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return _is_lenient(text)
    return True


def _is_lenient(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


_FUNCTION: dict[str, Change] = {"arguments": _arguments}
_MESSAGE: dict[str, Change] = {
    "tool_calls": jsonbytes.each({"function": jsonbytes.each(_FUNCTION)}),
    "function_call": jsonbytes.each(_FUNCTION),
}
