"""vLLM (and servers of its wire shape): ids beside the text, in streams too.

We ask for `return_token_ids` and `logprobs` with `top_logprobs` 0 (an explicit null yields none). `include_usage` is
not added: the engine then moves `system_fingerprint` from the last content event to the usage event, and the client's
copy could no longer be made equal. Source of the strip rules: captured pairs of answers with and without our fields.
"""

from collections.abc import Generator, Mapping
from functools import lru_cache
from typing import Any

from msgspec import Raw
from msgspec.structs import replace

from orchard_proxy.engines.base import Exchange, Prepared, SideRequest, Strip
from orchard_proxy.engines.evidence import model_problems
from orchard_proxy.engines.lax import lax_bool
from orchard_proxy.engines.reading import Tokens, read
from orchard_proxy.engines.upstream_body import TRUE, edited, untouched
from orchard_proxy.engines.verdict import Claim, conclude, read_prompt
from orchard_proxy.schema.enums import UpstreamStream
from orchard_proxy.schema.frames import Edit
from orchard_proxy.schema.records import CallEvidence
from orchard_proxy.wire import jsonbytes
from orchard_proxy.wire.chat import AnswerChoice, ChatRequest
from orchard_proxy.wire.jsonbytes import NULL, Change

_REASONING: dict[str, Change] = {"reasoning": NULL, "reasoning_content": NULL}
_REASONING_KEPT = Edit(
    name="reasoning_kept", detail="hiding it upstream would hide the token ids; hidden by us instead"
)


class Vllm:
    """The vLLM engine."""

    @property
    def name(self) -> str:
        """Return the name in the registry."""
        return "vllm"

    def prepare(self, request: ChatRequest, mode: UpstreamStream) -> Prepared:
        """Ask for ids and log-probabilities; what the client asked itself stays its own."""
        read = _as_read(request)
        if not request.has_messages or read is None:
            return untouched(request)
        hides_reasoning = lax_bool(request.value("include_reasoning")) is False
        asks_ids = lax_bool(request.value("return_token_ids")) is True
        shows_logprobs = _shows_logprobs(read)
        values = _ask(read, asks_ids=asks_ids, hides_reasoning=hides_reasoning)
        # Where it hides reasoning, the engine hides all that comes with each token; the prompt's ids are not of those.
        strip = Strip(
            prompt_ids=not asks_ids,
            ids=not asks_ids or hides_reasoning,
            logprobs=not shows_logprobs or hides_reasoning,
            empty_chunks=hides_reasoning or not (asks_ids or shows_logprobs),
            reasoning=hides_reasoning,
        )
        edits = (_REASONING_KEPT,) if hides_reasoning else ()
        whole = mode is UpstreamStream.OFF and not _is_spelt_oddly(request)
        return edited(read, values, strip, whole=whole, edits=edits)

    def strip_body(self, body: bytes, prepared: Prepared) -> bytes:
        """Set to null what the client did not ask for; plain answers print null there too."""
        return jsonbytes.edit(body, _changes(prepared.strip, "message"))

    def strip_event(self, data: bytes, prepared: Prepared) -> bytes | None:
        """Strip one event; drop it when it came only because of what we asked for."""
        strip = prepared.strip
        if (strip.empty_chunks or strip.reasoning) and _is_ours(data, strip):
            return None
        return jsonbytes.edit(data, _changes(strip, "delta"))

    def side(self, request: ChatRequest) -> Generator[SideRequest, bytes, None]:  # noqa: ARG002 - nothing to ask
        """Ask nothing: the answer holds all."""
        yield from ()

    def evidence(self, exchange: Exchange) -> CallEvidence:
        """Read ids from the answer itself."""
        reading = read(exchange)
        reading.problems += model_problems(exchange.request, reading.answer.model)
        claims = [_claim(said, reading.tokens.get(said.index, Tokens())) for said in reading.answer.choices]
        prompt = read_prompt(reading.prompts, exchange, reading.answer.usage)
        return conclude(exchange, reading, claims, prompt, usage_is_sum=True)


def _as_read(request: ChatRequest) -> ChatRequest | None:
    """Return the request as the engine reads it; None when it refuses a field that we would overwrite."""
    keys = ("stream", "logprobs", "return_token_ids")
    flags = {key: lax_bool(request.value(key)) for key in keys}
    if any(flags[key] is None and request.has(key) for key in keys):
        return None
    top = request.value("top_logprobs")
    if not flags["logprobs"] and not (top is None or (type(top) is int and top == 0)):
        return None
    return replace(request, stream=flags["stream"] is True, wants_logprobs=flags["logprobs"] is True)


def _is_spelt_oddly(request: ChatRequest) -> bool:
    """Say whether only the engine knows that this is a stream, or that it ends in usage: then the stream is its own."""
    options = request.value("stream_options")
    usage = options.get("include_usage") if isinstance(options, dict) else None
    return "stream" in request.mistyped or not isinstance(usage, bool | None)


def _ask(request: ChatRequest, *, asks_ids: bool, hides_reasoning: bool) -> dict[str, bytes | None]:
    """Return the fields to set; what the client asked itself stays as it spelt it."""
    values: dict[str, bytes | None] = {} if asks_ids else {"return_token_ids": TRUE}
    if not request.wants_logprobs:
        values["logprobs"] = TRUE
    if not request.has("top_logprobs"):
        values["top_logprobs"] = b"0"
    if hides_reasoning:
        values["include_reasoning"] = TRUE
    return values


def _shows_logprobs(request: ChatRequest) -> bool:
    """Say whether the client's own request makes the engine print log-probabilities: not with an explicit null."""
    return request.wants_logprobs and ("top_logprobs" not in request.members or request.has("top_logprobs"))


def _claim(said: AnswerChoice, tokens: Tokens) -> Claim:
    problems = ["malformed_token_arrays"] if tokens.malformed else []
    return Claim(said=said, ids=tokens.ids, entries=tokens.entries, problems=problems, contradicts=tokens.malformed)


@lru_cache(maxsize=64)
def _changes(strip: Strip, said: str) -> dict[str, Change]:
    choice: dict[str, Change] = {}
    if strip.ids:
        choice["token_ids"] = NULL
    if strip.logprobs:
        choice["logprobs"] = NULL
    if strip.reasoning:
        choice[said] = jsonbytes.each(_REASONING) if said == "message" else _without_reasoning
    top: dict[str, Change] = {"choices": jsonbytes.each(choice)} if choice else {}
    return {"prompt_token_ids": NULL, **top} if strip.prompt_ids else top


def _without_reasoning(delta: bytes) -> bytes:
    """Return a delta as the engine prints it where it hides reasoning: null, and nothing where nothing else is said."""
    members = jsonbytes.members(delta)
    if not members or "role" in members or any(key in members for key in _REASONING):
        hidden = jsonbytes.edit(delta, _REASONING)
        return b"{}" if members and _only_reasoning(jsonbytes.loads(delta)) else hidden
    ordered: dict[str, Raw] = {key: members[key] for key in ("content",) if key in members}
    return jsonbytes.dumps({**ordered, "reasoning": Raw(NULL), **members})


def _is_ours(data: bytes, strip: Strip) -> bool:
    """Say whether every choice of the event is without anything that the client would have got."""
    if not strip.reasoning and b"{}" not in data:
        return False
    try:
        chunk = jsonbytes.loads(data)
    except ValueError:
        return False
    choices = chunk.get("choices") if isinstance(chunk, dict) else None
    if not isinstance(choices, list) or not choices:
        return False
    return all(isinstance(choice, dict) and _says_nothing(choice, strip) for choice in choices)


def _says_nothing(choice: Mapping[str, Any], strip: Strip) -> bool:
    delta = choice.get("delta")
    if not isinstance(delta, dict) or choice.get("finish_reason") is not None:
        return False
    if not delta:
        return strip.empty_chunks
    return strip.reasoning and _only_reasoning(delta)


def _only_reasoning(delta: Mapping[str, Any]) -> bool:
    """Say whether a delta holds reasoning and no other thing."""
    rest = [value for key, value in delta.items() if key not in _REASONING]
    return len(rest) < len(delta) and not any(rest) and any(delta.get(key) for key in _REASONING)
