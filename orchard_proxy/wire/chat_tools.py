"""Tool calls put together from the fragments of a stream.

The invariant: two ids are two calls, whatever their indexes say; a fragment without an id belongs to the newest call
on its index.
"""

from typing import Any

from orchard_proxy.wire import jsonbytes
from orchard_proxy.wire.chat_message import arguments_text


class _Call:
    __slots__ = ("arguments", "id", "index", "name", "type")

    def __init__(self, index: int) -> None:
        self.index = index
        self.id: str | None = None
        self.type = "function"
        self.name = ""
        self.arguments: list[str] = []


class ToolCallFold:
    """Collect fragments `{index, id?, type?, function: {name?, arguments?}}` of one choice."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def add(self, fragment: dict[str, Any]) -> None:
        """Take the next fragment."""
        found = fragment.get("function")
        function: dict[str, Any] = found if isinstance(found, dict) else {}
        name = function["name"] if isinstance(function.get("name"), str) else ""
        call = self._call_of(fragment, name)
        if isinstance(fragment.get("type"), str) and fragment["type"]:
            call.type = fragment["type"]
        if name != call.name:
            call.name += name
        call.arguments.append(arguments_text(function.get("arguments")))

    def calls(self) -> list[dict[str, Any]]:
        """Return the whole calls, by index, then by arrival."""
        return [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.name, "arguments": "".join(call.arguments)},
            }
            for call in sorted(self._calls, key=lambda call: call.index)
        ]

    def _call_of(self, fragment: dict[str, Any], name: str) -> _Call:
        last = self._calls[-1].index if self._calls else 0
        index = fragment["index"] if type(fragment.get("index")) is int else last
        identity = fragment["id"] if isinstance(fragment.get("id"), str) and fragment["id"] else None
        here = [call for call in self._calls if call.index == index]
        for call in here if identity else ():
            if call.id == identity:
                return call
        current = here[-1] if here else None
        if current is None or self._begins_another(current, identity, name):
            current = _Call(index)
            self._calls.append(current)
        current.id = current.id or identity
        return current

    @staticmethod
    def _begins_another(current: _Call, identity: str | None, name: str) -> bool:
        if identity is not None and current.id is not None:
            return True
        written = "".join(current.arguments) if name else ""
        return bool(written) and (name != current.name or _is_whole(written))


def _is_whole(arguments: str) -> bool:
    try:
        jsonbytes.loads(arguments.encode("utf-8", "surrogatepass"))
    except ValueError:
        return False
    return True
