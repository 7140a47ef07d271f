"""What a new process does with the journal that an earlier one left.

Invariants: every whole frame stays where it is; bytes are cut only from the end of an old segment, only behind its
last good frame, and only after they were saved beside it.
"""

import logging
import os
from pathlib import Path

import msgspec

from orchard_proxy.errors import JournalDamagedError
from orchard_proxy.record.reader import Damage, is_torn, read_frames, read_header
from orchard_proxy.record.segments import HEADER_BYTES, list_segments
from orchard_proxy.record.summary import CONTROL, RolloutState, RolloutStates, load_summary, save_summary

__all__ = ["Repair", "RolloutState", "load_rollouts", "repair"]

logger = logging.getLogger(__name__)

COPY_BYTES = 1 << 20


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """What was found wrong with one segment, and what was done."""

    path: Path
    cut_bytes: int = 0
    saved: Path | None = None
    """Where the cut bytes are; None when nothing was cut."""
    damages: list[Damage] = []
    """Skipped, and left as they are."""
    problem: str = ""
    """Why the segment was left as it is."""


def repair(data_dir: Path) -> list[Repair]:
    """Check all segments, cut torn tails, and report. Only with the lock held and no segment open for writing.

    A segment that an earlier start checked is not read again. Raise JournalError when a newer Orchard wrote one.
    """
    paths = [path for paths in list_segments(data_dir).values() for path in paths]
    found = [_repair_segment(path) for path in paths]
    return [one for one in found if one is not None]


def load_rollouts(data_dir: Path) -> dict[str, RolloutState]:
    """Return the state of every rollout in the journal, by its id. Reads only; an unreadable segment is logged."""
    states = RolloutStates()
    for paths in list_segments(data_dir).values():
        for path in paths:
            try:
                _collect(path, states)
            except (JournalDamagedError, OSError) as error:
                logger.error("its rollouts are not known: %s", error)  # noqa: TRY400
    return states.by_id


def _collect(path: Path, states: RolloutStates) -> None:
    header = read_header(path)
    if header is None:
        return
    summary = load_summary(path, header.session_id)
    if summary is not None:
        for state in summary.rollouts:
            states.add(state)
        return
    for read in read_frames(path, kinds=CONTROL):
        states.add_frame(read.kind, read.payload)


def _repair_segment(path: Path) -> Repair | None:
    try:
        header = read_header(path)
        if header is None:
            return _cut(path, 0, [])
        if load_summary(path, header.session_id) is not None:
            return None
        states, damages, end = _check(path)
        done = _cut(path, end, damages)
        _sync(path)
    except (JournalDamagedError, OSError) as error:
        logger.error("left as it is: %s", error)  # noqa: TRY400
        return Repair(path=path, problem=str(error))
    if done is None or not done.problem:
        save_summary(path, header.session_id, states)
    return done


def _sync(path: Path) -> None:
    """Bring to the disk what the earlier process had written but, killed, could not sync any more."""
    with path.open("rb") as file:
        os.fdatasync(file.fileno())


def _check(path: Path) -> tuple[RolloutStates, list[Damage], int]:
    states, damages, end = RolloutStates(), list[Damage](), HEADER_BYTES
    for read in read_frames(path, on_damage=damages.append):
        states.add_frame(read.kind, read.payload)
        end = read.next_offset
    return states, damages, end


def _cut(path: Path, end: int, damages: list[Damage]) -> Repair | None:
    cut_bytes = path.stat().st_size - end
    if cut_bytes and end and not is_torn(path, end):
        # Whole frames that were written, and damaged since: nothing is gained by cutting, and a reader can name them.
        damages = [*damages, Damage(path=path, start=end, end=end + cut_bytes)]
        logger.error("%s: its last %d bytes are damaged and were left as they are", path, cut_bytes)
        cut_bytes = 0
    if cut_bytes == 0:
        return Repair(path=path, damages=damages) if damages else None
    try:
        saved = _save_tail(path, end)
        os.truncate(path, end)
    except OSError as error:
        # Harmless: nobody appends to an old segment, and readers stop at its last good frame.
        problem = f"the unfinished {cut_bytes} bytes at the end of {path} could not be cut off: {error.strerror}"
        logger.warning("%s", problem)
        return Repair(path=path, damages=damages, problem=problem)
    logger.warning("%s: %d bytes of an unfinished frame were cut off and saved as %s", path, cut_bytes, saved.name)
    return Repair(path=path, cut_bytes=cut_bytes, saved=saved, damages=damages)


def _save_tail(path: Path, end: int) -> Path:
    """Copy what is behind `end` to a new file, on the disk when this returns."""
    saved = path.with_name(path.name + ".torn")
    while saved.exists():
        saved = saved.with_name(saved.name + "+")
    temporary = saved.with_name(saved.name + ".tmp")
    with path.open("rb") as source, temporary.open("wb") as target:
        source.seek(end)
        while block := source.read(COPY_BYTES):
            target.write(block)
        target.flush()
        os.fsync(target.fileno())
    return temporary.replace(saved)
