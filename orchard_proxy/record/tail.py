"""Follow one worker's journal from segment to segment, also while it is being written.

Invariant: every frame comes once and in order; a change of session (the server died or was started again) is told
before the first frame of the new one. Segments that were removed are passed over, and that is logged.
"""

import logging
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

from orchard_proxy.errors import JournalDamagedError
from orchard_proxy.record.reader import Damage, Read, is_torn, read_frames, read_header
from orchard_proxy.record.segments import (
    FRAME_OVERHEAD_BYTES,
    HEADER_BYTES,
    Position,
    journal_dir,
    list_segments,
    segment_name,
    split_name,
)

logger = logging.getLogger(__name__)


class Step(NamedTuple):
    """One frame with the positions around it; `read` is None where a new session begins, or bytes are damaged."""

    read: Read | None
    start: Position
    end: Position
    damage: Damage | None = None


class Tail:
    """A place in one worker's journal that moves on as `steps` are taken."""

    def __init__(self, data_dir: Path, worker: str, start: Position | None) -> None:
        self.worker = worker
        self.position = start or Position(segment_name(worker, 0), 0)
        self._data_dir = data_dir
        self.session: bytes | None = None
        """The session that wrote the current segment; None before it was looked at."""
        self._damaged: set[str] = set()

    @property
    def idle(self) -> bool:
        """Say cheaply whether there is surely nothing new."""
        path = self._path
        successor = path.with_name(segment_name(self.worker, split_name(path.name)[1] + 1))
        try:
            return path.stat().st_size <= max(self.position.offset, HEADER_BYTES) and not successor.exists()
        except FileNotFoundError:
            return False

    def steps(self) -> Iterator[Step]:
        """Yield what there is now. `position` is behind each step when it is yielded."""
        while True:
            behind = self._behind()
            if self._path.exists():
                self.session = self.session or (yield from self._session_of(self._path))
                yield from self._frames(self._path)
            if not behind:
                return
            yield from self.end()
            if not (yield from self._enter(behind)):
                return

    def end(self) -> Iterator[Step]:
        """Report what is left at the end of a segment that grows no more: a torn frame, or a damaged one."""
        path = self._path
        if not path.exists():
            if self.position.offset or split_name(path.name)[1]:
                logger.warning("%s is gone; going on with the segment behind it", path)
            return
        at, size = max(self.position.offset, HEADER_BYTES), path.stat().st_size
        if at >= size or path.name in self._damaged:
            return
        if is_torn(path, at):
            logger.warning("%s ends in %d bytes that are no whole frame", path, size - at)
        else:
            yield from self._damage(path, Damage(path=path, start=at, end=size))

    @property
    def _path(self) -> Path:
        return journal_dir(self._data_dir) / self.position.segment

    def _behind(self) -> list[Path]:
        """Return the segments behind the current one. Once there is one, the current one grows no more."""
        paths = list_segments(self._data_dir).get(self.worker, [])
        number = split_name(self.position.segment)[1]
        return [path for path in paths if split_name(path.name)[1] > number]

    def _enter(self, behind: list[Path]) -> Generator[Step, None, bool]:
        """Go to the first segment that can be read; return False when that one has no header yet."""
        for path in behind:
            session = yield from self._session_of(path)
            if session is None and path.name not in self._damaged and path == behind[-1]:
                return False
            if session is not None:
                here = Position(path.name, HEADER_BYTES)
                self.position = here
                changed, self.session = session != self.session, session
                if changed:
                    yield Step(None, here, here)
                return True
        return False

    def _frames(self, path: Path) -> Iterator[Step]:
        damages: list[Damage] = []
        try:
            for read in read_frames(path, self.position.offset, on_damage=damages.append):
                for damage in damages:
                    self.position = Position(path.name, damage.end)
                    yield self._reported(damage)
                damages.clear()
                size = len(read.payload) + FRAME_OVERHEAD_BYTES
                start = Position(path.name, read.next_offset - size)
                self.position = Position(path.name, read.next_offset)
                yield Step(read, start, self.position)
        except JournalDamagedError as error:
            yield from self._unreadable(path, error)

    def _session_of(self, path: Path) -> Generator[Step, None, bytes | None]:
        try:
            header = read_header(path)
        except JournalDamagedError as error:
            yield from self._unreadable(path, error)
            return None
        except FileNotFoundError:
            return None
        return header.session_id if header else None

    def _unreadable(self, path: Path, error: JournalDamagedError) -> Iterator[Step]:
        """Report, once, a segment of which nothing (more) can be read."""
        if path.name in self._damaged:
            return
        logger.error("%s", error)
        start = self.position.offset if path.name == self.position.segment else 0
        yield from self._damage(path, Damage(path=path, start=start, end=path.stat().st_size))

    def _damage(self, path: Path, damage: Damage) -> Iterator[Step]:
        if path.name not in self._damaged:
            self._damaged.add(path.name)
            yield self._reported(damage)

    def _reported(self, damage: Damage) -> Step:
        logger.error("%s: bytes %d to %d could not be derived", damage.path, damage.start, damage.end)
        start, end = (Position(damage.path.name, offset) for offset in (damage.start, damage.end))
        return Step(None, start, end, damage)
