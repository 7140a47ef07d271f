"""llama.cpp's server: what we ask of it, what we hide again.

Its streams lose tokens (the stop token, pieces of an emoji, stop strings, tool-call marks), so by default we ask for a
whole answer, whose `__verbose.tokens` holds every id, and the client's stream is made by us. What it says is read in
`llamacpp_evidence`. Prompt ids come from `/apply-template` and `/tokenize`, which do as the chat route does.
"""

from collections.abc import Generator
from functools import lru_cache
from typing import Any

from orchard_proxy.engines.base import Exchange, Prepared, SideRequest, Strip
from orchard_proxy.engines.llamacpp_evidence import read_evidence
from orchard_proxy.engines.upstream_body import TRUE, edited, untouched
from orchard_proxy.schema.enums import UpstreamStream
from orchard_proxy.schema.records import CallEvidence
from orchard_proxy.wire import jsonbytes
from orchard_proxy.wire.chat import ChatRequest, repair_tool_arguments
from orchard_proxy.wire.jsonbytes import Change

_ASK_WHOLE: dict[str, bytes | None] = {"verbose": TRUE, "return_tokens": TRUE}
_NOT_FOR_TEMPLATE = ("stream", "stream_options", "logprobs", "top_logprobs", "n")
_ONE: dict[str, bytes | None] = {"logprobs": TRUE, "top_logprobs": b"1"}


class LlamaCpp:
    """The llama.cpp engine."""

    @property
    def name(self) -> str:
        """Return the name in the registry."""
        return "llamacpp"

    def prepare(self, request: ChatRequest, mode: UpstreamStream) -> Prepared:
        """Ask for a whole answer with every id; for the engine's own stream only where the user insists on it."""
        if not request.has_messages or _is_refused(request):
            return untouched(request)
        whole = not (request.stream and mode is UpstreamStream.ON)
        shown = _shows_logprobs(request)
        values = {} if shown else _ask_logprobs(request, whole=whole)
        if whole:
            values |= _ASK_WHOLE
        strip = Strip(
            ids=request.value("return_tokens") is not True,
            logprobs=not shown,
            verbose=request.value("verbose") is not True,
        )
        return edited(request, values, strip, whole=whole)

    def strip_body(self, body: bytes, prepared: Prepared) -> bytes:
        """Remove what the client did not ask for; plain answers do not have the keys."""
        return jsonbytes.edit(body, _changes(prepared.strip))

    def strip_event(self, data: bytes, prepared: Prepared) -> bytes | None:
        """Strip one event. None is ever dropped: our fields cause no events here."""
        if b"logprobs" not in data and b"__verbose" not in data:
            return data
        return jsonbytes.edit(data, _changes(prepared.strip))

    def side(self, request: ChatRequest) -> Generator[SideRequest, bytes, None]:
        """Render the prompt, then cut it into tokens, both as the chat route does."""
        if not request.has_messages or _is_refused(request):
            return
        body = repair_tool_arguments(request.body) or request.body
        body = jsonbytes.set_members(body, dict.fromkeys(_NOT_FOR_TEMPLATE))
        prompt = read_prompt_text((yield SideRequest(path="/apply-template", body=body)))
        if prompt is not None:
            tokenize = {"content": prompt, "add_special": True, "parse_special": True}
            yield SideRequest(path="/tokenize", body=jsonbytes.dumps(tokenize))

    def evidence(self, exchange: Exchange) -> CallEvidence:
        """Read ids from the verbose report, or from the logprobs entries where they are all there."""
        return read_evidence(exchange)


def read_prompt_text(answer: bytes) -> str | None:
    """Return the rendered prompt of an `/apply-template` answer."""
    try:
        body = jsonbytes.loads(answer)
    except ValueError:
        return None
    prompt = body.get("prompt") if isinstance(body, dict) else None
    return prompt if isinstance(prompt, str) else None


def _is_refused(request: ChatRequest) -> bool:
    """Say whether the engine refuses the request for a field that we would overwrite or leave out."""
    logprobs, top = request.value("logprobs"), request.value("top_logprobs")
    if "stream" in request.mistyped or not isinstance(logprobs, bool | int | float | None):
        return True
    if top is not None and logprobs is not True:
        return True
    if request.stream and logprobs is True and request.has_tools:
        return True
    options = request.value("stream_options")
    if request.stream and isinstance(options, dict) and not isinstance(options.get("include_usage"), bool | None):
        return True
    flags = all(isinstance(request.value(key), bool | None) for key in ("verbose", "return_tokens"))
    return not flags or not isinstance(request.value("n_probs"), int | float | None)


def _shows_logprobs(request: ChatRequest) -> bool:
    """Say whether the client's own request makes the engine print log-probabilities."""
    logprobs, top = request.value("logprobs"), request.value("top_logprobs")
    if logprobs is True:
        return not _is_number(top) or top >= 1
    if _is_number(logprobs) and logprobs >= 1:
        return True
    n_probs = request.value("n_probs")
    return _is_number(n_probs) and n_probs >= 1


def _ask_logprobs(request: ChatRequest, *, whole: bool) -> dict[str, bytes | None]:
    """Return the fields that ask for the chosen token's log-probability and no more."""
    raw: dict[str, bytes | None] = {"post_sampling_probs": None}
    if not whole and not request.has_tools:
        return _ONE | raw
    return {"n_probs": b"1", "logprobs": None, "top_logprobs": None} | raw


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@lru_cache(maxsize=8)
def _changes(strip: Strip) -> dict[str, Change]:
    changes: dict[str, Change] = {"choices": jsonbytes.each({"logprobs": None})} if strip.logprobs else {}
    return {"__verbose": None if strip.verbose else jsonbytes.each(_report_changes(strip)), **changes}


def _report_changes(strip: Strip) -> dict[str, Change]:
    """Return what to change in a report that the client asked for: what it says only because we asked for more."""
    changes: dict[str, Change] = {"tokens": b"[]"} if strip.ids else {}
    if strip.logprobs:
        changes |= {"completion_probabilities": None, "generation_settings": jsonbytes.each({"n_probs": b"0"})}
    return changes
