"""The deltas that a choice of a whole answer becomes in a stream, and which logprobs entries and ids ride on each.

Not the chunks around them: `chat_synth` puts each part in its envelope. The invariant: every entry and id of the choice
rides on exactly one part, in order.
"""

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from orchard_proxy.wire import jsonbytes
from orchard_proxy.wire.chat_cut import Piece, cut
from orchard_proxy.wire.chat_message import REASONING

Members = dict[str, Raw]

_NULL = Raw(b"null")
_BLANKS = (b"null", b"[]", b'""', b"{}")
_encode = msgspec.json.Encoder().encode


class Part(msgspec.Struct, frozen=True):
    """One chunk of one choice, before it is put in its envelope."""

    delta: bytes
    logprobs: Raw | None = None
    token_ids: Raw | None = None
    cut_off: bool = False
    """The text before a stop string inside a token, which has no entry of its own."""


def parts_of(choice: Members, source_entries: Sequence[Raw], *, vllm: bool) -> list[Part]:
    """Return the chunks of a choice after its role: reasoning, content, tool calls, the rest, the end."""
    message = message_of(choice)
    content = message.get("content", _NULL)
    pieces = _cut(content, source_entries) or []
    before = _before(message)
    text = [_encode({"content": piece.text}) for piece in pieces]
    if not text and not is_blank(content):
        text = [_encode({"content": content})]
    after = _after(message, content_null=vllm)
    deltas = [*before, *text, *after]
    # vLLM ends with the last token's chunk, which has text unless that token is a stop token.
    ends_in_text = vllm and pieces and not after and sum(p.entries for p in pieces) == len(source_entries)
    if not ends_in_text:
        deltas.append(b"{}")
    return _with_evidence(choice, deltas, len(before), pieces)


def _before(message: Members) -> list[bytes]:
    reasoning = {key: value for key, value in message.items() if key in REASONING and not is_blank(value)}
    return [_encode(reasoning)] if reasoning else []


def _after(message: Members, *, content_null: bool) -> list[bytes]:
    out: list[bytes] = []
    for position, call in enumerate(jsonbytes.elements(bytes(message.get("tool_calls", _NULL))) or []):
        lead: Members = {"content": _NULL} if content_null else {}
        fragment = _call(jsonbytes.members(bytes(call)) or {}, position)
        out.append(_encode(lead | {"tool_calls": Raw(b"[" + fragment + b"]")}))
    spoken = {"role", "content", "tool_calls", *REASONING}
    rest = {key: value for key, value in message.items() if key not in spoken and not is_blank(value)}
    return [*out, _encode(rest)] if rest else out


def _call(call: Members, position: int) -> bytes:
    ordered: Members = {"index": Raw(b"%d" % position)}
    for key in ("id", "type", "function"):
        if key in call:
            ordered[key] = call[key]
    return _encode({**call, **ordered} if "index" in call else {**ordered, **call})


def _with_evidence(choice: Members, deltas: list[bytes], first: int, pieces: Sequence[Piece]) -> list[Part]:
    """Let logprobs and ids that the client asked for ride on the deltas."""
    shown = jsonbytes.members(bytes(choice.get("logprobs", _NULL)))
    entries = entries_of(choice)
    ids = jsonbytes.elements(bytes(choice.get("token_ids", _NULL))) or []
    counts = _counts(len(deltas), first, pieces, len(entries), len(ids))
    parts: list[Part] = []
    at = 0
    for delta, count in zip(deltas, counts, strict=True):
        mine, numbers = entries[at : at + count], ids[at : at + count]
        logprobs = None
        if shown is not None and (mine or (not entries and not parts)):
            logprobs = Raw(_encode(shown | {"content": Raw(_encode(mine))} if mine else shown))
            shown = dict.fromkeys(shown, _NULL)  # what is beside the entries is said once
        cut_off = bool(pieces) and not pieces[-1].entries and len(parts) == first + len(pieces) - 1
        parts.append(Part(delta, logprobs, Raw(_encode(numbers)) if numbers else None, cut_off))
        at += count
    return parts


def _counts(deltas: int, first: int, pieces: Sequence[Piece], entries: int, ids: int) -> list[int]:
    """Return how many entries (and ids) ride on each delta: as the text was cut, else all on the first."""
    total = max(entries, ids)
    counts = [0] * deltas
    aligned = pieces and sum(piece.entries for piece in pieces) <= total and (entries == ids or not entries or not ids)
    if aligned:
        counts[first : first + len(pieces)] = [piece.entries for piece in pieces]
    counts[-1 if aligned else 0] += total - sum(counts)
    return counts


def _cut(content: Raw, entries: Sequence[Raw]) -> list[Piece] | None:
    if not entries or is_blank(content):
        return None
    try:
        text = jsonbytes.loads(bytes(content))
    except ValueError:
        return None
    return cut(text, entries) if isinstance(text, str) else None


def entries_of(choice: Members) -> list[Raw]:
    """Return the choice's logprobs entries, none when there are none."""
    shown = jsonbytes.members(bytes(choice.get("logprobs", _NULL))) or {}
    return jsonbytes.elements(bytes(shown.get("content", _NULL))) or []


def message_of(choice: Members) -> Members:
    """Return the members of the choice's message."""
    return jsonbytes.members(bytes(choice.get("message", _NULL))) or {}


def is_blank(raw: Raw) -> bool:
    """Say whether the value says nothing: null or empty."""
    return bytes(raw) in _BLANKS
