"""What an engine is to the proxy: how to ask it for evidence, what to hide from the client, how to read evidence back.

Pure: bytes in, bytes out. Nothing here opens a connection; requests beside the generation are yielded by `side`, and
whoever drives the generator does the I/O. Invariant: what `prepare` adds, `strip_body` and `strip_event` take away
again, so that the client's copy equals what the engine would have said without us.
"""

from collections.abc import Generator
from typing import Protocol

import msgspec

from orchard_proxy.schema.enums import UpstreamStream
from orchard_proxy.schema.frames import Edit, EvidenceFrame
from orchard_proxy.schema.records import CallEvidence
from orchard_proxy.wire.chat import ChatRequest


class Strip(msgspec.Struct, frozen=True, kw_only=True):
    """What the client did not ask for, decided in `prepare`. Each engine knows which keys are meant."""

    prompt_ids: bool = False
    ids: bool = False
    """Token ids of the answer."""
    logprobs: bool = False
    empty_chunks: bool = False
    """Stream events without text that exist only to carry our ids."""
    reasoning: bool = False
    """Reasoning that the client asked the engine to hide, and that we had to ask for."""
    verbose: bool = False
    """llama.cpp's `__verbose` report."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """How one request goes upstream."""

    body: bytes
    """The upstream request body."""
    stream: bool
    """Whether the upstream answer is asked for as a stream."""
    synthesise: bool = False
    """The client wants a stream and upstream gives a whole answer: the stream is made by us."""
    edits: list[Edit] = []
    strip: Strip = Strip()


class SideRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A POST of JSON beside the generation; `path` begins with a slash and is relative to the engine's root."""

    path: str
    body: bytes


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """Everything recorded of one call: what `evidence` reads."""

    request: bytes
    """The client's request body."""
    upstream_stream: bool = False
    status: int | None = None
    """The engine's HTTP status; None when it never answered."""
    content_type: str = ""
    answer: bytes = b""
    """All bytes that the engine sent."""
    side: list[EvidenceFrame] = []
    outcome: str = "complete"
    logprobs_mode: str = "none"
    """`raw`, `processed` or `none`, as the probe found it."""
    n_vocab: int | None = None
    """Size of the vocabulary, where the engine tells it."""


class Engine(Protocol):
    """One kind of policy server."""

    @property
    def name(self) -> str:
        """Return the name in the registry."""
        ...

    def prepare(self, request: ChatRequest, mode: UpstreamStream) -> Prepared:
        """Return the upstream request; a request that must fail on its own goes up as it came."""
        ...

    def strip_body(self, body: bytes, prepared: Prepared) -> bytes:
        """Return the client's copy of a whole answer; one that is not JSON comes back unchanged."""
        ...

    def strip_event(self, data: bytes, prepared: Prepared) -> bytes | None:
        """Return the client's copy of one event's data; None drops the event."""
        ...

    def side(self, request: ChatRequest) -> Generator[SideRequest, bytes, None]:
        """Yield requests to make beside the generation; each 200 answer is sent in. A failed one ends it."""
        ...

    def evidence(self, exchange: Exchange) -> CallEvidence:
        """Read what the exchange proves. Never raises for anything that an engine may send."""
        ...
