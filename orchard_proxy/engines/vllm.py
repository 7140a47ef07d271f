"""vLLM (and servers of its wire shape): ids beside the text, in streams too.

We ask for `return_token_ids` and `logprobs` with `top_logprobs` 0 (an explicit null yields none). `include_usage` is
not added: the engine then moves `system_fingerprint` from the last content event to the usage event, and the client's
copy could no longer be made equal. Source of the strip rules: captured pairs of answers with and without our fields.
"""

from collections.abc import Generator, Mapping
from functools import lru_cache
from typing import Any

from orchard_proxy.engines.base import Exchange, Prepared, SideRequest, Strip
from orchard_proxy.engines.evidence import model_problems
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
        if not request.ok or _is_refused(request):
            return untouched(request)
        hides_reasoning = request.value("include_reasoning") is False
        asks_ids = request.value("return_token_ids") is True
        values: dict[str, bytes | None] = {"return_token_ids": TRUE, "logprobs": TRUE}
        if not request.has("top_logprobs"):
            values["top_logprobs"] = b"0"
        if hides_reasoning:
            values["include_reasoning"] = TRUE
        strip = Strip(
            ids=not asks_ids or hides_reasoning,  # hidden reasoning hides both upstream too
            logprobs=not _shows_logprobs(request) or hides_reasoning,
            empty_chunks=not asks_ids and not request.wants_logprobs,
            reasoning=hides_reasoning,
        )
        edits = (_REASONING_KEPT,) if hides_reasoning else ()
        return edited(request, values, strip, whole=mode is UpstreamStream.OFF, edits=edits)

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


def _is_refused(request: ChatRequest) -> bool:
    """Say whether the engine refuses the request for a field that we would overwrite."""
    if request.mistyped & {"stream", "logprobs"} or not _is_flag(request, "return_token_ids"):
        return True
    top = request.value("top_logprobs")
    return not request.wants_logprobs and not (top is None or (type(top) is int and top == 0))


def _shows_logprobs(request: ChatRequest) -> bool:
    """Say whether the client's own request makes the engine print log-probabilities: not with an explicit null."""
    return request.wants_logprobs and ("top_logprobs" not in request.members or request.has("top_logprobs"))


def _is_flag(request: ChatRequest, key: str) -> bool:
    return not request.has(key) or isinstance(request.value(key), bool)


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
        choice[said] = jsonbytes.each(_REASONING)
    top: dict[str, Change] = {"choices": jsonbytes.each(choice)} if choice else {}
    return {"prompt_token_ids": NULL, **top} if strip.ids else top


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
