"""Payloads of the journal's frames.

Together they hold everything from which the catalog can be derived again. Structured payloads are msgpack maps of
these structs; unknown fields are ignored on reading, so that a field can be added without a new format version.
CHUNK carries an 8-byte little-endian time (microseconds since the epoch) and then the bytes as the engine sent them.
"""

from enum import IntEnum

import msgspec

from orchard_proxy.schema.enums import Outcome, RolloutStatus
from orchard_proxy.schema.records import Failure


class FrameType(IntEnum):
    """The type byte of a frame. Numbers are part of the file format."""

    ROLLOUT = 1
    BEGIN = 2
    EDIT = 3
    HEAD = 4
    CHUNK = 5
    EVIDENCE = 6
    END = 7
    DELIVERED = 8
    FINISH = 9


class RolloutFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout was created. `key_sha256` is the hash of its capability, never the capability itself."""

    rollout_id: str
    created_us: int
    key_sha256: str = ""
    implicit: bool = False
    """Made by the first call under `--open`, not by POST /rollouts."""
    body_sha256: str = ""
    """Digest of the creating request; the same id with another digest is a conflict."""
    group_id: str | None = None
    task_id: str | None = None
    attempt: int = 1
    run_id: str | None = None
    harness: str | None = None
    harness_version: str | None = None
    image_digest: str | None = None
    model: str | None = None
    metadata: bytes = b"{}"
    """A JSON object as text. Not Raw: that would be written into the msgpack map as if it were msgpack."""


class BeginFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A call reached us: what the client sent, before anything was changed."""

    rollout_id: str
    seq: int
    """Order of arrival in the rollout, from 0, unique within one run of the server."""
    begun_us: int
    dialect: str
    path: str
    headers: dict[str, str]
    """Allow-listed request headers only; never a credential."""
    body: bytes


class Edit(msgspec.Struct, frozen=True, kw_only=True):
    """One change that we made to what passed through."""

    name: str
    detail: str = ""


class EditFrame(msgspec.Struct, frozen=True, kw_only=True):
    """How the call was sent upstream."""

    engine: str
    engine_url: str
    edits: list[Edit]
    upstream_stream: bool
    logprobs_mode: str = "none"
    """`raw`, `processed` or `none`, as the engine's probe found it."""
    n_vocab: int | None = None
    """Size of the vocabulary, where the engine tells it: an id beyond it is none."""


class HeadFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's status line and headers."""

    status: int
    headers: dict[str, str]
    received_us: int


class EvidenceFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One request beside the generation (for example /tokenize) and its answer, or why it failed."""

    path: str
    request: bytes
    status: int
    answer: bytes = b""
    error: str = ""


class EndFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The call is committed. Written before the client can see the end."""

    outcome: Outcome
    ended_us: int
    failure: Failure | None = None
    late: bool = False
    """In flight when the rollout was finished: kept, masked."""
    edits: list[Edit] = []
    """Edits known only at the end: keep-alive comments, an error after a 200."""


class DeliveredFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel took our last byte for the client."""

    delivered_us: int


class FinishFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout was finished, or its reward set again. The last frame wins."""

    rollout_id: str
    finished_us: int
    status: RolloutStatus | None = None
    """None: as it was; `completed` when this is the first finish."""
    reward: float | None = None
    rewards: dict[str, float] = {}
    metadata: bytes = b"{}"
    """A JSON object as text."""
    failure: Failure | None = None
    version: int = 1
    """1 for the first finish of a rollout, then counted up."""
