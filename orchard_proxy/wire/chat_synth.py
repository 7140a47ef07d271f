"""A stream made from a whole answer, for engines whose own streams cannot carry every token id.

The invariant: folding the stream gives the message of the whole answer, and every value keeps the engine's spelling.
Key order and the choice between null and absent follow the engine, told apart by the shape of its body alone.
"""

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Raw

from orchard_proxy.wire import jsonbytes, sse
from orchard_proxy.wire.chat_errors import error_event
from orchard_proxy.wire.chat_parts import Members, Part, entries_of, is_blank, message_of, parts_of
from orchard_proxy.wire.chat_prefill import in_stream, reported_index, without_prefill
from orchard_proxy.wire.chat_request import ChatRequest

_DONE = sse.encode(sse.DONE)
_NULL = Raw(b"null")
_CHUNK = Raw(b'"chat.completion.chunk"')
_LINE_ENDS_TO_SPACES = bytes.maketrans(b"\r\n", b"  ")
_encode = msgspec.json.Encoder().encode

_LLAMACPP_ORDER = ("choices", "created", "id", "model", "system_fingerprint", "object")
"""llama.cpp's chunks, which order their keys otherwise than its whole answers."""

_ENVELOPE = ("id", "object", "created", "model", "service_tier", "system_fingerprint", "choices")
_ALWAYS = ("index", "finish_reason", "stop_reason")
_FIRST_CHUNK = ("prompt_token_ids", "prompt_text")
"""vLLM: only in the role chunk."""


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
    chunks = _Maker(top, request, source).chunks()
    return [*(sse.encode(_one_line(chunk)) for chunk in chunks), _DONE]


class _Maker:
    """Lay out the chunks of one answer."""

    def __init__(self, top: Members, request: ChatRequest, source: bytes | None) -> None:
        self._top = top
        self._include_usage = request.include_usage
        self._choices = _choices(top)
        whole = jsonbytes.members(source) or {} if source else top
        self._sources = _choices(whole)
        self._llamacpp = next(iter(top), "") == "choices"
        if self._llamacpp:
            self._choices = without_prefill(self._choices, whole.get("__verbose"), request)
        self._vllm = "prompt_token_ids" in top
        order = _LLAMACPP_ORDER if self._llamacpp else tuple(k for k in top if k in _ENVELOPE)
        if self._vllm:  # says these once, at the end
            order = tuple(k for k in order if k not in {"system_fingerprint", "service_tier"})
        self._head, self._foot = _envelope(top, order)
        said = {*order, *_FIRST_CHUNK, "usage", "choices", "service_tier", "__verbose"}
        self._timings = {"timings": top["timings"]} if "timings" in top else {}
        self._report = top.get("__verbose")
        self._tail = {k: v for k, v in top.items() if k not in said and not is_blank(v)}

    def chunks(self) -> Iterator[bytes]:
        """Yield each chunk's JSON: choice by choice, then the usage."""
        for position, choice in enumerate(self._choices):
            first = {key: self._top[key] for key in _FIRST_CHUNK if key in self._top}
            yield self._chunk(self._choice(choice, self._role(choice), opening=True), first)
            source = self._sources[position] if position < len(self._sources) else {}
            *parts, last = parts_of(choice, entries_of(source), vllm=self._vllm)
            for part in parts:
                yield self._chunk(self._choice(choice, part), self._timings if part.cut_off else None)
            yield self._chunk(self._choice(choice, last, closing=True), self._closing(position))
        if self._include_usage:
            yield self._chunk(b"", {"usage": self._usage()} | self._tail)

    def _usage(self) -> Raw:
        usage = self._top.get("usage", _NULL)
        counts = jsonbytes.members(bytes(usage)) if self._vllm else None
        if counts is None:
            return usage
        return Raw(_encode({key: value for key, value in counts.items() if value != _NULL}))

    def _closing(self, position: int) -> Members:
        """Return what rides on a choice's last chunk: timings, its own report; all else on the stream's last."""
        out: Members = {}
        if not self._include_usage:
            out = self._tail if position == len(self._choices) - 1 else self._timings
        index = bytes(self._choices[position]["index"])
        if self._report is not None and index == b"%d" % reported_index(self._report):
            return out | {"__verbose": in_stream(self._report)}
        return out

    def _chunk(self, choice: bytes, extra: Members | None = None) -> bytes:
        more = b"," + _inside(extra) if extra else b""
        return b"".join((self._head, choice, self._foot, more, b"}"))

    def _role(self, choice: Members) -> Part:
        role = message_of(choice).get("role", _NULL)
        role = Raw(b'"assistant"') if is_blank(role) else role
        return Part(_encode({"role": role, "content": _NULL if self._llamacpp else Raw(b'""')}))

    def _choice(self, choice: Members, part: Part, *, opening: bool = False, closing: bool = False) -> bytes:
        """Return one chunk's choice, its members in the order of the whole answer's."""
        out: Members = {}
        for key, value in choice.items():
            if key == "message":
                out["delta"] = Raw(part.delta)
            elif key == "logprobs":
                self._show(out, part, closing=closing)
            elif key == "token_ids":
                if not opening:
                    out[key] = part.token_ids or _NULL
            elif closing or key in {"index", "finish_reason"}:
                self._say(out, key, value, closing=closing)
        return _encode(out)

    def _show(self, out: Members, part: Part, *, closing: bool) -> None:
        if not self._llamacpp:
            out["logprobs"] = part.logprobs or _NULL
        elif part.logprobs is not None and not closing:  # its streams end without the stop token's entry
            out["logprobs"] = part.logprobs

    @staticmethod
    def _say(out: Members, key: str, value: Raw, *, closing: bool) -> None:
        if key == "finish_reason" and not closing:
            out[key] = _NULL
        elif key in _ALWAYS or not is_blank(value):  # what we do not know is said once, at the end
            out[key] = value


def _envelope(top: Members, order: Sequence[str]) -> tuple[bytes, bytes]:
    """Return what stands before and behind the choice in every chunk; the closing brace is left off."""
    known = {key: _CHUNK if key == "object" else top[key] for key in order if key in top}
    at = list(known).index("choices")
    before, after = (dict(items) for items in (list(known.items())[:at], list(known.items())[at + 1 :]))
    head = b"{" + (_inside(before) + b"," if before else b"") + b'"choices":['
    return head, b"]" + (b"," + _inside(after) if after else b"")


def _inside(members: Members) -> bytes:
    return _encode(members)[1:-1]


def _choices(top: Members) -> list[Members]:
    found = jsonbytes.elements(bytes(top.get("choices", _NULL))) or []
    choices = [jsonbytes.members(bytes(raw)) or {} for raw in found]
    return [choice | _absent(choice, {"index": Raw(b"%d" % i), "message": _NULL}) for i, choice in enumerate(choices)]


def _absent(members: Members, defaults: Members) -> Members:
    return {key: value for key, value in defaults.items() if key not in members}


def _one_line(data: bytes) -> bytes:
    """Put JSON on one line, since not every client joins several; a line end in JSON can only be space."""
    return data.translate(_LINE_ENDS_TO_SPACES) if b"\n" in data or b"\r" in data else data
