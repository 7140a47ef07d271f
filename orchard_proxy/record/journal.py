"""The journal's writer: append-only, inline writes, `fdatasync` behind.

It knows frames and files, not what frames mean. Invariants:
- `commit` returns only when its frames, and all frames of that call before them, are written (and, with durability
  "power", on the disk).
- A failed write leaves no part of a frame. Calls whose buffered frames it took with it fail at their own commit; the
  others go on, and a later commit works again once the cause is gone.
- Old segments are never appended to.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal, Self

from orchard_proxy.errors import JournalError
from orchard_proxy.record import lock, recovery
from orchard_proxy.record.segment_file import SegmentChain, describe
from orchard_proxy.record.segments import (
    CONTROL_ID,
    FRAME_OVERHEAD_BYTES,
    Frame,
    Position,
    encode_frame,
    journal_dir,
    next_number,
    seal,
    session_seed,
)
from orchard_proxy.record.syncer import Syncer, sync_folder

__all__ = ["Durability", "Frame", "Journal", "Position", "encode_frame"]

logger = logging.getLogger(__name__)

Durability = Literal["process", "power"]
"""process: survives kill -9; power: survives a power cut."""

SEGMENT_BYTES = 256 << 20
FLUSH_BYTES = 64 << 10
FLUSH_S = 0.04
"""Buffered frames are written within 50 ms, also when the loop is a little late."""


class Journal:
    """The journal of one worker. Make it with `Journal.open`; end it with `aclose` or `async with`."""

    def __init__(
        self, lock_fd: int, chain: SegmentChain, syncer: Syncer, session_id: bytes, durability: Durability
    ) -> None:
        self.session_id = session_id
        self._lock_fd = lock_fd
        self._chain = chain
        self._durability = durability
        self._seed = session_seed(session_id)
        self._syncer = syncer
        syncer.on_failure = self._sync_failed
        chain.on_switch = syncer.switch
        self._pieces: list[bytes] = []
        self._buffered_bytes = 0
        self._buffered_ids: set[bytes] = set()
        self._lost: dict[bytes, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._distrust = False
        """A background sync failed: commits wait for the disk until one has worked again."""
        self._failing = False
        self._closed = False

    @classmethod
    def open(
        cls,
        data_dir: Path,
        *,
        worker: str = "w0",
        durability: Durability = "process",
        segment_bytes: int = SEGMENT_BYTES,
        fdatasync: Callable[[int], None] = os.fdatasync,
    ) -> Self:
        """Lock the folder, repair what an earlier process left, begin a new segment. Raise JournalError.

        `fdatasync` is the door to the disk, called in a thread.
        """
        folder = journal_dir(data_dir)
        session_id = os.urandom(16)
        with contextlib.ExitStack() as undo, _told_as_journal_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock_fd = lock.acquire(Path(data_dir), session_id)
            undo.callback(os.close, lock_fd)
            recovery.repair(Path(data_dir))
            chain = SegmentChain(folder, worker, next_number(data_dir, worker), session_id, segment_bytes)
            undo.callback(os.close, chain.current.fd)
            sync_folder(folder)
            undo.pop_all()
        return cls(lock_fd, chain, Syncer(chain.current, fdatasync), session_id, durability)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def append(self, frames: Sequence[Frame]) -> None:
        """Buffer frames; they are written within 50 ms, at 64 KiB, or by the next commit. Never raises for the disk.

        Frames of a call that has lost some already are dropped: the call will fail at its commit.
        """
        if self._closed:
            logger.warning("the journal is closed: %d frames dropped", len(frames))
            return
        for frame in frames:
            if frame.call_id not in self._lost:
                self._pieces += seal(frame, self._seed)
                self._buffered_bytes += len(frame.payload) + FRAME_OVERHEAD_BYTES
                self._buffered_ids.add(frame.call_id)
        if self._buffered_bytes >= FLUSH_BYTES:
            self.flush()
        elif self._timer is None and self._pieces:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    async def commit(self, frames: Sequence[Frame]) -> None:
        """Write what is buffered and these frames, and return when they are durable.

        Raise JournalError when they are not, or when earlier frames of the same call were lost.
        """
        if self._closed:
            raise JournalError("the journal is closed: the server is stopping. Send the request again.")
        call_ids = {frame.call_id for frame in frames}
        for call_id in call_ids:
            if (reason := self._lost.pop(call_id, None)) is not None:
                raise JournalError(f"an earlier part of this call was lost: {reason}")
        pieces = [piece for frame in frames for piece in seal(frame, self._seed)]
        self._write_with_buffer(pieces, call_ids)
        if self._durability == "process" and not self._distrust:
            self._syncer.later()
            return
        try:
            await self._syncer.now()
        except JournalError:
            for call_id in call_ids:
                self._lost.pop(call_id, None)  # told here
            raise
        self._distrust = False

    @property
    def failing(self) -> bool:
        """Whether the last write failed."""
        return self._failing

    def position(self) -> Position:
        """Return the place behind everything written so far."""
        return self._chain.position()

    async def aclose(self) -> None:
        """Write and sync what is left, close the files, give the lock back. Raise JournalError when that failed."""
        if self._closed:
            return
        pieces, call_ids = self._take()
        self._closed = True
        try:
            if pieces:
                self._write(pieces, call_ids)
        finally:
            await self._end()

    async def _end(self) -> None:
        try:
            await self._syncer.aclose()
        finally:
            os.close(self._lock_fd)

    def flush(self) -> None:
        """Write the buffer. What cannot be written is lost, and its calls are marked."""
        pieces, call_ids = self._take()
        if not pieces:
            return
        try:
            self._write(pieces, call_ids)
        except JournalError as error:
            self._lose(call_ids, str(error))
        else:
            self._syncer.later()

    def _write_with_buffer(self, frames: list[bytes], call_ids: Collection[bytes]) -> None:
        buffered, buffered_ids = self._take()
        try:
            self._write([*buffered, *frames], {*buffered_ids, *call_ids})
        except JournalError:
            if buffered:
                self._write_or_lose(buffered, buffered_ids, call_ids)
            raise

    def _write_or_lose(self, buffered: list[bytes], buffered_ids: set[bytes], told: Collection[bytes]) -> None:
        """Save the frames of other calls from a commit that failed, perhaps only because it was large."""
        try:
            self._write(buffered, buffered_ids)
        except JournalError as error:
            self._lose(buffered_ids.difference(told), str(error))

    def _take(self) -> tuple[list[bytes], set[bytes]]:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        taken = self._pieces, self._buffered_ids
        self._pieces, self._buffered_ids, self._buffered_bytes = [], set(), 0
        return taken

    def _write(self, pieces: list[bytes], call_ids: Collection[bytes]) -> None:
        try:
            self._chain.write(pieces, sum(map(len, pieces)))
        except JournalError as error:
            if not self._failing:
                logger.error("%s", error)  # noqa: TRY400
            self._failing = True
            raise
        if self._failing:
            logger.warning("the journal can be written again")
            self._failing = False
        if self._durability == "power":
            self._syncer.note(call_ids)

    def _lose(self, call_ids: Collection[bytes], reason: str) -> None:
        self._lost.update((call_id, reason) for call_id in call_ids if call_id != CONTROL_ID)

    def _sync_failed(self, call_ids: Collection[bytes], reason: str) -> None:
        """Note what may be gone. The segment is marked broken, so the next write begins a new one."""
        logger.error("%s", reason)
        self._distrust = True
        self._lose(call_ids, reason)


@contextlib.contextmanager
def _told_as_journal_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JournalError(describe(folder, error)) from error
