"""Any server that speaks chat completions: text, and no evidence that could be trained on.

Nothing is added, so nothing is stripped. The invariant: the body goes up as the client sent it, but for broken tool
arguments in its history, and for the stream where the user asked for whole answers.
"""

from collections.abc import Generator

from orchard_proxy.engines.base import Exchange, Prepared, SideRequest, Strip
from orchard_proxy.engines.evidence import model_problems
from orchard_proxy.engines.reading import Tokens, read
from orchard_proxy.engines.upstream_body import edited, untouched
from orchard_proxy.engines.verdict import Claim, Prompt, conclude
from orchard_proxy.schema.enums import UpstreamStream
from orchard_proxy.schema.records import CallEvidence
from orchard_proxy.wire.chat import ChatRequest


class OpenAi:
    """The generic engine."""

    @property
    def name(self) -> str:
        """Return the name in the registry."""
        return "openai"

    def prepare(self, request: ChatRequest, mode: UpstreamStream) -> Prepared:
        """Forward."""
        if not request.has_messages or "stream" in request.mistyped:
            return untouched(request)
        return edited(request, {}, Strip(), whole=mode is UpstreamStream.OFF)

    def strip_body(self, body: bytes, prepared: Prepared) -> bytes:  # noqa: ARG002 - nothing was added
        """Return the answer as it is."""
        return body

    def strip_event(self, data: bytes, prepared: Prepared) -> bytes | None:  # noqa: ARG002 - nothing was added
        """Return the event as it is."""
        return data

    def side(self, request: ChatRequest) -> Generator[SideRequest, bytes, None]:  # noqa: ARG002 - nothing to ask
        """Ask nothing."""
        yield from ()

    def evidence(self, exchange: Exchange) -> CallEvidence:
        """Read the text; tokens are counted, not known."""
        reading = read(exchange)
        reading.problems += model_problems(exchange.request, reading.answer.model)
        claims = [
            Claim(said=said, entries=reading.tokens.get(said.index, Tokens()).entries, problems=["text_only"])
            for said in reading.answer.choices
        ]
        return conclude(exchange, reading, claims, Prompt(problems=["no_prompt_ids"]), usage_is_sum=True)
