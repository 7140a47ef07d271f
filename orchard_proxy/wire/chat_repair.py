"""Histories with tool arguments that are not JSON, made sendable.

A model that was cut, or that wrote nonsense, leaves arguments such as `{"a": ` in the harness's history; engines then
refuse every later call of the rollout. The upstream copy gets `{"_malformed": "<raw>"}` in their place; everything
else stays byte for byte, and the record keeps what the client sent.
"""

import functools
from collections.abc import Iterator

import msgspec

from orchard_proxy.wire import jsonbytes
from orchard_proxy.wire.jsonbytes import Change


class _Function(msgspec.Struct):
    arguments: msgspec.Raw = msgspec.Raw(b'""')


class _Call(msgspec.Struct):
    function: _Function | None = None


class _Message(msgspec.Struct):
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None


class _Request(msgspec.Struct):
    messages: list[_Message] = []


_REQUEST = msgspec.json.Decoder(_Request)
_SKIP = msgspec.json.Decoder(msgspec.Raw)


def repair_tool_arguments(body: bytes) -> bytes | None:
    """Return the request body with valid tool arguments, or None when there is nothing to repair."""
    if b"arguments" not in body or not _needs_repair(body):
        return None
    fixed = jsonbytes.edit(body, {"messages": _CHANGE})
    return None if fixed == body else fixed


def _needs_repair(body: bytes) -> bool:
    """Say quickly that there is nothing to do, where the body has the documented shape."""
    try:
        request = _REQUEST.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return True
    return any(_arguments(raw) != raw for raw in _all_arguments(request))


def _all_arguments(request: _Request) -> Iterator[bytes]:
    for message in request.messages:
        for call in message.tool_calls or ():
            if call.function is not None:
                yield bytes(call.function.arguments)
        if message.function_call is not None:
            yield bytes(message.function_call.arguments)


def _arguments(raw: bytes) -> bytes:
    """Repair the value of one `arguments` member: a string that is neither empty nor JSON."""
    if not raw.startswith(b'"') or raw == b'""':
        return raw
    try:
        text = jsonbytes.loads(raw)
    except ValueError:
        return raw
    if _is_json(text):
        return raw
    return jsonbytes.dumps(jsonbytes.dumps({"_malformed": text}).decode())


def _is_json(text: str) -> bool:
    try:
        _SKIP.decode(text.encode("utf-8", "surrogatepass"))
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


def _messages_change() -> Change:
    function = jsonbytes.each({"arguments": _arguments})
    message: dict[str, Change] = {"tool_calls": jsonbytes.each({"function": function}), "function_call": function}

    def change(raw: bytes) -> bytes:
        return jsonbytes.edit(raw, message) if b"arguments" in raw else raw

    return functools.partial(jsonbytes.map_elements, change=change)


_CHANGE = _messages_change()
