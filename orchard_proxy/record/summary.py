"""What a server must know of rollouts when it starts, and a small file beside each old segment that says it again.

`<segment>.sum` is derived from the segment and may be deleted at any time: then the segment is read once more. It
makes the second start on a large journal cheap. Invariant: it is believed only when it names the size and the session
of the segment as it lies there.
"""

import logging
from pathlib import Path

import msgspec

from orchard_proxy.schema.frames import FinishFrame, FrameType, RolloutFrame

logger = logging.getLogger(__name__)

SUMMARY_VERSION = 1
CONTROL = frozenset({FrameType.ROLLOUT, FrameType.BEGIN, FrameType.FINISH})
"""The frames that a RolloutState is made of."""


class RolloutState(msgspec.Struct, frozen=True, kw_only=True):
    """What the server must know of one rollout when it starts."""

    rollout_id: str
    key_sha256: str = ""
    body_sha256: str = ""
    implicit: bool = False
    created_us: int = 0
    """0: its ROLLOUT frame is not in the journal."""
    finished_us: int | None = None
    """When it was finished first; None while it accepts calls."""
    finish_version: int = 0
    next_seq: int = 0
    """The `seq` of its next call."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One checked segment."""

    version: int = SUMMARY_VERSION
    session_id: bytes
    size_bytes: int
    rollouts: list[RolloutState]


class _BeginHead(msgspec.Struct, frozen=True):
    """The part of a BeginFrame that is needed here; the body is skipped, not copied."""

    rollout_id: str
    seq: int


_ROLLOUT = msgspec.msgpack.Decoder(RolloutFrame)
_BEGIN = msgspec.msgpack.Decoder(_BeginHead)
_FINISH = msgspec.msgpack.Decoder(FinishFrame)
_SUMMARY = msgspec.msgpack.Decoder(Summary)


class RolloutStates:
    """Collects states frame by frame, or summary by summary, in any order."""

    def __init__(self) -> None:
        self.by_id: dict[str, RolloutState] = {}

    def add_frame(self, kind: FrameType, payload: bytes) -> None:
        """Take in a frame; other kinds are ignored, and one that does not decode is logged."""
        try:
            state = _state_of(kind, payload)
        except msgspec.DecodeError as error:
            logger.error("a %s frame cannot be decoded and was ignored: %s", kind.name, error)  # noqa: TRY400
            return
        if state is not None:
            self.add(state)

    def add(self, state: RolloutState) -> None:
        """Take in a state, joined with what is known of the rollout."""
        known = self.by_id.get(state.rollout_id)
        self.by_id[state.rollout_id] = state if known is None else _join(known, state)


def _state_of(kind: FrameType, payload: bytes) -> RolloutState | None:
    if kind is FrameType.BEGIN:
        begin = _BEGIN.decode(payload)
        return RolloutState(rollout_id=begin.rollout_id, next_seq=begin.seq + 1)
    if kind is FrameType.ROLLOUT:
        frame = _ROLLOUT.decode(payload)
        return RolloutState(
            rollout_id=frame.rollout_id,
            key_sha256=frame.key_sha256,
            body_sha256=frame.body_sha256,
            implicit=frame.implicit,
            created_us=frame.created_us,
        )
    if kind is FrameType.FINISH:
        finish = _FINISH.decode(payload)
        return RolloutState(rollout_id=finish.rollout_id, finished_us=finish.finished_us, finish_version=finish.version)
    return None


def _join(one: RolloutState, other: RolloutState) -> RolloutState:
    created = one if one.created_us else other
    finishes = [state.finished_us for state in (one, other) if state.finished_us is not None]
    return RolloutState(
        rollout_id=one.rollout_id,
        key_sha256=created.key_sha256,
        body_sha256=created.body_sha256,
        implicit=created.implicit,
        created_us=created.created_us,
        finished_us=min(finishes, default=None),
        finish_version=max(one.finish_version, other.finish_version),
        next_seq=max(one.next_seq, other.next_seq),
    )


def load_summary(segment: Path, session_id: bytes) -> Summary | None:
    """Return the summary beside a segment; None when there is none that fits."""
    try:
        summary = _SUMMARY.decode(_path(segment).read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    fits = (SUMMARY_VERSION, session_id, segment.stat().st_size)
    return summary if (summary.version, summary.session_id, summary.size_bytes) == fits else None


def save_summary(segment: Path, session_id: bytes, states: RolloutStates) -> None:
    """Write the summary of a checked segment. A failure is only logged: nothing depends on the file."""
    summary = Summary(session_id=session_id, size_bytes=segment.stat().st_size, rollouts=list(states.by_id.values()))
    path = _path(segment)
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(msgspec.msgpack.encode(summary))
        temporary.replace(path)
    except OSError as error:
        logger.warning("%s could not be written, so the next start reads the segment again: %s", path, error)


def _path(segment: Path) -> Path:
    return segment.with_name(segment.name + ".sum")
