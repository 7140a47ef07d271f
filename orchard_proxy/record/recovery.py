"""What a new process does with the journal that an earlier one left.

Invariants: every whole frame stays where it is; bytes are cut only from the end of an old segment, only behind its
last good frame, and only after they were saved beside it.
"""

import logging
import os
from pathlib import Path

import msgspec

from orchard_proxy.errors import JournalDamagedError
from orchard_proxy.record.reader import Damage, read_frames, read_header
from orchard_proxy.record.segments import HEADER_BYTES, list_segments
from orchard_proxy.schema.frames import BeginFrame, FinishFrame, FrameType, RolloutFrame

logger = logging.getLogger(__name__)

CONTROL = frozenset({FrameType.ROLLOUT, FrameType.BEGIN, FrameType.FINISH})


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """What was found wrong with one segment, and what was done."""

    path: Path
    cut_bytes: int = 0
    saved: Path | None = None
    """Where the cut bytes are; None when nothing was cut."""
    damages: list[Damage] = []
    problem: str = ""
    """Why the segment was left as it is."""


class RolloutState(msgspec.Struct, frozen=True, kw_only=True):
    """What the server must know of a rollout when it starts."""

    rollout_id: str
    key_sha256: str = ""
    body_sha256: str = ""
    implicit: bool = False
    created_us: int = 0
    finished: bool = False
    finish_version: int = 0
    """Version of its last finish; 0 = never finished."""
    next_seq: int = 0
    """The `seq` of its next call."""


def repair(data_dir: Path) -> list[Repair]:
    """Cut torn tails of all segments. Call it only with the lock held and no segment open for writing."""
    found = []
    for paths in list_segments(data_dir).values():
        for path in paths:
            one = _repair_segment(path)
            if one is not None:
                found.append(one)
    return found


def _repair_segment(path: Path) -> Repair | None:
    damages: list[Damage] = []
    try:
        end = HEADER_BYTES if read_header(path) else 0
        for read in read_frames(path, on_damage=damages.append):
            end = read.next_offset
    except JournalDamagedError as error:
        logger.error("%s", error)  # noqa: TRY400
        return Repair(path=path, problem=str(error))
    torn_bytes = path.stat().st_size - end
    if torn_bytes == 0:
        return Repair(path=path, damages=damages) if damages else None
    saved = path.with_name(path.name + ".torn")
    with path.open("rb") as file:
        file.seek(end)
        saved.write_bytes(file.read())
    os.truncate(path, end)
    logger.warning("%s: %d bytes of an unfinished frame were cut off and saved as %s", path, torn_bytes, saved)
    return Repair(path=path, cut_bytes=torn_bytes, saved=saved, damages=damages)


def load_rollouts(data_dir: Path) -> dict[str, RolloutState]:
    """Return the state of every rollout in the journal, by its id."""
    states: dict[str, RolloutState] = {}
    for paths in list_segments(data_dir).values():
        for path in paths:
            for read in read_frames(path, kinds=CONTROL):
                _apply(states, read.kind, read.payload)
    return states


def _apply(states: dict[str, RolloutState], kind: FrameType, payload: bytes) -> None:
    if kind is FrameType.ROLLOUT:
        frame = msgspec.msgpack.decode(payload, type=RolloutFrame)
        old = states.get(frame.rollout_id, RolloutState(rollout_id=frame.rollout_id))
        states[frame.rollout_id] = msgspec.structs.replace(
            old,
            key_sha256=frame.key_sha256,
            body_sha256=frame.body_sha256,
            implicit=frame.implicit,
            created_us=frame.created_us,
        )
    elif kind is FrameType.BEGIN:
        begin = msgspec.msgpack.decode(payload, type=BeginFrame)
        old = states.get(begin.rollout_id, RolloutState(rollout_id=begin.rollout_id))
        states[begin.rollout_id] = msgspec.structs.replace(old, next_seq=max(old.next_seq, begin.seq + 1))
    elif kind is FrameType.FINISH:
        finish = msgspec.msgpack.decode(payload, type=FinishFrame)
        old = states.get(finish.rollout_id, RolloutState(rollout_id=finish.rollout_id))
        version = max(old.finish_version, finish.version)
        states[finish.rollout_id] = msgspec.structs.replace(old, finished=True, finish_version=version)
