"""A stream made from a whole answer, for engines whose own streams cannot carry every token id.

The invariant: folding the stream gives the message of the whole answer, and every value keeps the engine's spelling.
Key order and the choice between null and absent follow the engine, told apart by the shape of its body alone.
"""

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Raw

from orchard_proxy.wire import jsonbytes, sse
from orchard_proxy.wire.chat_cut import Piece, cut
from orchard_proxy.wire.chat_errors import error_event
from orchard_proxy.wire.chat_message import REASONING
from orchard_proxy.wire.chat_request import ChatRequest

Members = dict[str, Raw]

_DONE = sse.encode(sse.DONE)
_NULL = Raw(b"null")
_BLANK = (b"null", b"[]", b'""', b"{}")
_CHUNK = Raw(b'"chat.completion.chunk"')
_LINE_ENDS_TO_SPACES = bytes.maketrans(b"\r\n", b"  ")
_encode = msgspec.json.Encoder().encode

_LLAMACPP_ORDER = ("choices", "created", "id", "model", "system_fingerprint", "object")
"""llama.cpp's chunks, which order their keys otherwise than its whole answers."""

_ENVELOPE = ("id", "object", "created", "model", "service_tier", "system_fingerprint", "choices")
_FIRST_CHUNK = ("prompt_token_ids", "prompt_text")
"""vLLM: only in the role chunk."""


class _Part(msgspec.Struct, frozen=True):
    """One chunk of one choice, before it is put in its envelope."""

    delta: bytes
    logprobs: Raw | None = None
    token_ids: Raw | None = None


def synthesise(body: bytes, request: ChatRequest, *, source: bytes | None = None) -> list[bytes]:
    """Return the stream's events, `[DONE]` last, from a whole answer that is already stripped for the client.

    `source` is the answer before stripping: its logprobs entries, where they join to the content, tell where to cut.
    """
    top = jsonbytes.members(body)
    if top is None:
        broken = error_event("The engine's answer is not a JSON object.", type="upstream_error", code="bad_answer")
        return [broken, _DONE]
    if "choices" not in top:  # an error object, or nothing that a stream could say otherwise
        return [sse.encode(_one_line(_encode(top))), _DONE]
    return [*map(sse.encode, _Maker(top, request, source).chunks()), _DONE]


class _Maker:
    """Lay out the chunks of one answer."""

    def __init__(self, top: Members, request: ChatRequest, source: bytes | None) -> None:
        self._top = top
        self._include_usage = request.include_usage
        self._choices = _choices(top)
        self._sources = _choices(jsonbytes.members(source) or {}) if source else self._choices
        self._llamacpp = next(iter(top), "") == "choices"
        self._vllm = "prompt_token_ids" in top
        order = _LLAMACPP_ORDER if self._llamacpp else tuple(k for k in top if k in _ENVELOPE)
        if self._vllm:  # says these once, at the end
            order = tuple(k for k in order if k not in {"system_fingerprint", "service_tier"})
        self._order = order
        said = {*order, *_FIRST_CHUNK, "usage", "choices", "service_tier"}
        self._tail = {k: v for k, v in top.items() if k not in said and not _blank(v)}

    def chunks(self) -> Iterator[bytes]:
        """Yield each chunk's JSON: choice by choice, then the usage."""
        for position, choice in enumerate(self._choices):
            first = {key: self._top[key] for key in _FIRST_CHUNK if key in self._top}
            yield self._chunk([self._choice(choice, position, self._role(choice), opening=True)], first)
            source = self._sources[position] if position < len(self._sources) else {}
            *parts, last = _parts(choice, _entries(source), vllm=self._vllm)
            for part in parts:
                yield self._chunk([self._choice(choice, position, part)])
            yield self._chunk([self._choice(choice, position, last, closing=True)], self._closing(position))
        if self._include_usage:
            yield self._chunk([], {"usage": self._usage()} | self._tail)

    def _usage(self) -> Raw:
        usage = self._top.get("usage", _NULL)
        counts = jsonbytes.members(bytes(usage)) if self._vllm else None
        if counts is None:
            return usage
        return Raw(_encode({key: value for key, value in counts.items() if value != _NULL}))

    def _closing(self, position: int) -> Members:
        """Return what rides on a choice's last chunk: llama.cpp's timings on each, all else on the stream's last."""
        if self._include_usage:
            return {}
        if position == len(self._choices) - 1:
            return self._tail
        return {key: value for key, value in self._tail.items() if key == "timings"}

    def _chunk(self, choices: list[bytes], extra: Members | None = None) -> bytes:
        out: Members = {}
        for key in self._order:
            if key == "choices":
                out[key] = Raw(b"[" + b",".join(choices) + b"]")
            elif key in self._top:
                out[key] = _CHUNK if key == "object" else self._top[key]
        return _one_line(_encode(out | (extra or {})))

    def _role(self, choice: Members) -> _Part:
        role = _message(choice).get("role", Raw(b'"assistant"'))
        return _Part(_encode({"role": role, "content": _NULL if self._llamacpp else Raw(b'""')}))

    def _choice(
        self, choice: Members, position: int, part: _Part, *, opening: bool = False, closing: bool = False
    ) -> bytes:
        """Return one chunk's choice, its members in the order of the whole answer's."""
        values: dict[str, Raw | None] = {
            "message": Raw(part.delta),
            "finish_reason": choice.get("finish_reason") if closing else _NULL,
            "logprobs": self._shown(part, closing=closing),
            "token_ids": None if opening else part.token_ids or _NULL,
            "stop_reason": choice.get("stop_reason") if closing else None,
        }
        out: Members = {} if "index" in choice else {"index": Raw(b"%d" % position)}
        for key, value in ({"message": _NULL} | choice if "message" not in choice else choice).items():
            said = (
                values[key] if key in values else value if key == "index" or (closing and not _blank(value)) else None
            )
            if said is not None:
                out["delta" if key == "message" else key] = said
        return _encode(out)

    def _shown(self, part: _Part, *, closing: bool) -> Raw | None:
        if not self._llamacpp:
            return part.logprobs or _NULL
        return None if closing else part.logprobs  # its streams end without the stop token's entry


def _parts(choice: Members, source_entries: Sequence[Raw], *, vllm: bool) -> list[_Part]:
    """Return the chunks of a choice after its role: reasoning, content, tool calls, the rest, the end."""
    message = _message(choice)
    content = message.get("content", _NULL)
    pieces = _cut(content, source_entries) or []
    before = _before(message)
    text = [_encode({"content": piece.text}) for piece in pieces]
    if not text and not _blank(content):
        text = [_encode({"content": content})]
    after = _after(message, content_null=vllm)
    deltas = [*before, *text, *after]
    # vLLM ends with the last token's chunk, which has text unless that token is a stop token.
    ends_in_text = vllm and pieces and not after and sum(p.entries for p in pieces) == len(source_entries)
    if not ends_in_text:
        deltas.append(b"{}")
    return _with_evidence(choice, deltas, len(before), pieces)


def _before(message: Members) -> list[bytes]:
    reasoning = {key: value for key, value in message.items() if key in REASONING and not _blank(value)}
    return [_encode(reasoning)] if reasoning else []


def _after(message: Members, *, content_null: bool) -> list[bytes]:
    out: list[bytes] = []
    for position, call in enumerate(jsonbytes.elements(bytes(message.get("tool_calls", _NULL))) or []):
        lead: Members = {"content": _NULL} if content_null else {}
        fragment = _call(jsonbytes.members(bytes(call)) or {}, position)
        out.append(_encode(lead | {"tool_calls": Raw(b"[" + fragment + b"]")}))
    spoken = {"role", "content", "tool_calls", *REASONING}
    rest = {key: value for key, value in message.items() if key not in spoken and not _blank(value)}
    return [*out, _encode(rest)] if rest else out


def _call(call: Members, position: int) -> bytes:
    ordered: Members = {"index": Raw(b"%d" % position)}
    for key in ("id", "type", "function"):
        if key in call:
            ordered[key] = call[key]
    return _encode({**call, **ordered} if "index" in call else {**ordered, **call})


def _with_evidence(choice: Members, deltas: list[bytes], first: int, pieces: Sequence[Piece]) -> list[_Part]:
    """Let logprobs and ids that the client asked for ride on the deltas."""
    shown = jsonbytes.members(bytes(choice.get("logprobs", _NULL)))
    entries = _entries(choice)
    ids = jsonbytes.elements(bytes(choice.get("token_ids", _NULL))) or []
    if shown is None and not ids:
        return [_Part(delta) for delta in deltas]
    total = max(len(entries), len(ids))
    aligned = sum(piece.entries for piece in pieces) <= total and (not ids or not entries or len(ids) == len(entries))
    counts = [0] * len(deltas)
    if pieces and aligned:
        counts[first : first + len(pieces)] = [piece.entries for piece in pieces]
        counts[-1] += total - sum(counts)
    else:
        counts[0] = total
    parts: list[_Part] = []
    at = 0
    for delta, count in zip(deltas, counts, strict=True):
        logprobs = _logprobs(shown, entries[at : at + count]) if shown is not None and count else None
        mine = ids[at : at + count]
        parts.append(_Part(delta, logprobs, Raw(_encode(mine)) if mine else None))
        at += count
    return parts


def _logprobs(shown: Members, entries: Sequence[Raw]) -> Raw:
    return Raw(_encode({**shown, "content": Raw(_encode(entries))}))


def _cut(content: Raw, entries: Sequence[Raw]) -> list[Piece] | None:
    if not entries or _blank(content):
        return None
    try:
        text = jsonbytes.loads(bytes(content))
    except ValueError:
        return None
    return cut(text, entries) if isinstance(text, str) else None


def _entries(choice: Members) -> list[Raw]:
    shown = jsonbytes.members(bytes(choice.get("logprobs", _NULL))) or {}
    return jsonbytes.elements(bytes(shown.get("content", _NULL))) or []


def _message(choice: Members) -> Members:
    return jsonbytes.members(bytes(choice.get("message", _NULL))) or {}


def _choices(top: Members) -> list[Members]:
    found = jsonbytes.elements(bytes(top.get("choices", _NULL))) or []
    return [choice for choice in (jsonbytes.members(bytes(raw)) for raw in found) if choice is not None]


def _one_line(data: bytes) -> bytes:
    """Put JSON on one line, since not every client joins several; a line end in JSON can only be space."""
    return data.translate(_LINE_ENDS_TO_SPACES) if b"\n" in data or b"\r" in data else data


def _blank(raw: Raw) -> bool:
    return bytes(raw) in _BLANK
