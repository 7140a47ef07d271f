"""`fdatasync` behind the writes, in one thread.

Every waiter of a round shares its one `fdatasync` (group commit). Invariant: a waiter is released only when all
segments that hold its bytes, and the folder entries of those segments, are on the disk.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from orchard_proxy.errors import JournalError
from orchard_proxy.record.segment_file import SegmentFile, describe

logger = logging.getLogger(__name__)

BEHIND_S = 0.01
"""CONTRACTS allow 20 ms from a write to its fdatasync; a round takes 1 to 8 ms on a busy disk."""


class Syncer:
    """Brings the segments of one journal to the disk."""

    def __init__(self, current: SegmentFile, fdatasync: Callable[[int], None] = os.fdatasync) -> None:
        self._current = current
        self._fdatasync = fdatasync
        self._retired: list[SegmentFile] = []
        self._folder_dirty = False
        self.on_failure: Callable[[Collection[bytes], str], None] = lambda _ids, _reason: None
        """Told of every failed round: the noted ids since the last good one, and a sentence."""
        self._waiters: list[asyncio.Future[None]] = []
        self._ids: set[bytes] = set()
        self._dirty = False
        self._timer: asyncio.TimerHandle | None = None
        self._round: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "orchard-fdatasync")

    def switch(self, current: SegmentFile) -> None:
        """Go on with a new segment; the old one is synced and closed in the next round."""
        self._retired.append(self._current)
        self._current = current
        self._folder_dirty = True

    def later(self) -> None:
        """Sync what is written within 20 ms."""
        self._dirty = True
        if self._timer is None and self._round is None:
            self._timer = asyncio.get_running_loop().call_later(BEHIND_S, self._start)

    def note(self, call_ids: Collection[bytes]) -> None:
        """Remember whose frames wait for a sync, to name them when it fails."""
        self._ids.update(call_ids)

    async def now(self) -> None:
        """Return when everything written so far is on the disk. Raise JournalError when that failed."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        if self._round is None:
            self._start()
        await waiter

    async def aclose(self) -> None:
        """Sync the rest and close all files. Raise JournalError when that failed."""
        try:
            await self.now()
            if self._round is not None:
                await self._round
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._thread.shutdown()
            for segment in (*self._retired, self._current):
                os.close(segment.fd)

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._round = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        """Run rounds as long as someone waits; then leave the rest to the timer."""
        try:
            await self._one_round()
            while self._waiters:
                await self._one_round()
        finally:
            self._round = None
        if self._dirty:
            self.later()

    async def _one_round(self) -> None:
        waiters, self._waiters = self._waiters, []
        ids, self._ids = self._ids, set()
        retired, self._retired = self._retired, []
        folder = self._current.path.parent if self._folder_dirty else None
        self._folder_dirty = self._dirty = False
        loop = asyncio.get_running_loop()
        try:
            problem = await loop.run_in_executor(self._thread, self._sync, retired, self._current, folder)
            if problem is not None:
                self.on_failure(ids, problem)
            _settle(waiters, problem)
        finally:
            _settle(waiters, "the server stopped before the journal was on the disk. Send the request again.")

    def _sync(self, retired: list[SegmentFile], current: SegmentFile, folder: Path | None) -> str | None:
        """Sync in the thread; return what went wrong. A file that failed is `broken`: a second try would lie."""
        problem = None
        for segment in (*retired, current):
            try:
                self._fdatasync(segment.fd)
                if segment is current and folder is not None:
                    sync_folder(folder)
            except OSError as error:
                problem = problem if segment.broken else describe(segment.path, error)
                segment.broken = True
        for segment in retired:
            os.close(segment.fd)
        return problem


def _settle(waiters: list[asyncio.Future[None]], problem: str | None) -> None:
    for waiter in waiters:
        if waiter.done():
            continue  # settled already, or its call was cancelled
        if problem is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(JournalError(problem))


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
