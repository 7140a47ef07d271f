"""The upstream copy of a request: members set or removed by bytes, each change listed.

Not engine knowledge: which members, each engine says. The invariant: what is not listed in the edits leaves as it came.
"""

from collections.abc import Mapping

from orchard_proxy.engines.base import Prepared, Strip
from orchard_proxy.schema.frames import Edit
from orchard_proxy.wire import jsonbytes
from orchard_proxy.wire.chat import ChatRequest, repair_tool_arguments

TRUE = b"true"
WHOLE: dict[str, bytes | None] = {"stream": None, "stream_options": None}
"""Members to change where the client's stream is made by us from a whole answer."""

SYNTHESISED = Edit(name="synthesised_stream", detail="made from one whole answer")


def untouched(request: ChatRequest) -> Prepared:
    """Return the request as it came: the engine is to refuse it, or not, in its own words."""
    return Prepared(body=request.body, stream=request.stream)


def edited(
    request: ChatRequest, values: Mapping[str, bytes | None], strip: Strip, *, whole: bool, edits: tuple[Edit, ...] = ()
) -> Prepared:
    """Return the request with `values` set (None removes) and broken tool arguments made valid."""
    values = {**values, **(WHOLE if whole and request.stream else {})}
    changed = {key: value for key, value in values.items() if _current(request, key) != value}
    repaired = repair_tool_arguments(request.body)
    listed = [Edit(name=f"field:{key}", detail="removed" if v is None else v.decode()) for key, v in changed.items()]
    if repaired is not None:
        listed.append(Edit(name="tool_arguments_repaired", detail="arguments that are not JSON, as a JSON object"))
    synthesise = whole and request.stream
    if synthesise:
        listed.append(SYNTHESISED)
    body = request.body if repaired is None else repaired
    return Prepared(
        body=jsonbytes.set_members(body, changed) if changed else body,
        stream=request.stream and not whole,
        synthesise=synthesise,
        edits=[*listed, *edits],
        strip=strip,
    )


def _current(request: ChatRequest, key: str) -> bytes | None:
    raw = request.members.get(key)
    return None if raw is None else bytes(raw)
