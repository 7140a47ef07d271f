"""The writing side of segments: one file, and the chain of files that a journal writes one after another.

Invariant: a file ends behind a whole frame, except while a write is under way or after a cut that itself failed;
in that case the segment says that it is `broken` and takes nothing more.
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from orchard_proxy.errors import JournalError
from orchard_proxy.record.segments import HEADER_BYTES, Position, encode_header, segment_name

logger = logging.getLogger(__name__)

IOV_MAX = 1024
JOIN_BYTES = 1 << 16
"""Up to this, one copy and one `write` are cheaper than a `writev` of many small pieces."""

_ADVICE = {
    errno.ENOSPC: "Free space on that disk, or move the folder with --data.",
    errno.EDQUOT: "Raise the quota or free space, or move the folder with --data.",
    errno.EFBIG: "Raise the file size limit (ulimit -f), or move the folder with --data.",
    errno.EROFS: "Mount it writable, or move the folder with --data.",
    errno.EACCES: "Make the folder writable, or move it with --data.",
    errno.EIO: "Check that disk (dmesg), or move the folder with --data.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
}


def describe(path: Path, error: OSError) -> str:
    """Return a sentence that says which file failed and what to do."""
    advice = _ADVICE.get(error.errno or 0, "Check that disk, or move the folder with --data.")
    return f"cannot write the journal {path}: {error.strerror}. {advice}"


class SegmentFile:
    """A segment that this process writes."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.end = 0
        """Offset behind the last whole write."""
        self.broken = False

    @classmethod
    def create(cls, path: Path, session_id: bytes, created_us: int) -> "SegmentFile":
        """Create the file with its header. Raise JournalError; then no file is left."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError as error:
            raise JournalError(describe(path, error)) from error
        segment = cls(path, fd)
        try:
            segment.write([encode_header(session_id, created_us)])
        except JournalError:
            os.close(fd)
            path.unlink()
            raise
        return segment

    def write(self, pieces: Sequence[bytes]) -> None:
        """Write all pieces or nothing. Raise JournalError after cutting back to the last good offset."""
        if self.broken:
            raise JournalError(f"{self.path} takes no more frames: an earlier failed write could not be cut off.")
        try:
            self.end += _write_all(self.fd, pieces)
        except OSError as error:
            self._cut_back()
            raise JournalError(describe(self.path, error)) from error

    def _cut_back(self) -> None:
        try:
            os.ftruncate(self.fd, self.end)
            os.lseek(self.fd, self.end, os.SEEK_SET)
        except OSError as error:
            self.broken = True
            logger.error("%s could not be cut back to %d: %s", self.path, self.end, error)  # noqa: TRY400


class SegmentChain:
    """Writes to a segment and goes on to the next one when it is full or broken."""

    def __init__(self, folder: Path, worker: str, number: int, session_id: bytes, limit_bytes: int) -> None:
        self._folder = folder
        self._worker = worker
        self._number = number
        self._session_id = session_id
        self._limit_bytes = limit_bytes
        self.on_switch: Callable[[SegmentFile], None] = lambda _: None
        """Told of every new segment; the old one is its to sync and close."""
        self.current = self._create()

    def position(self) -> Position:
        """Return the place behind everything written."""
        return Position(self.current.path.name, self.current.end)

    def write(self, pieces: Sequence[bytes], total_bytes: int) -> None:
        """Write all pieces, into one segment, or nothing. Raise JournalError."""
        full = self.current.end + total_bytes > self._limit_bytes and self.current.end > HEADER_BYTES
        if self.current.broken or full:
            self._go_on()
        try:
            self.current.write(pieces)
        except JournalError as error:
            cause = error.__cause__
            too_big = isinstance(cause, OSError) and cause.errno == errno.EFBIG
            if not too_big or self.current.end == HEADER_BYTES:
                raise
            self._go_on()  # a limit on the size of files: a new file has room again
            self.current.write(pieces)

    def _go_on(self) -> None:
        try:
            segment = self._create()
        except JournalError as error:
            if self.current.broken:
                raise
            logger.error("no new segment, so the old one grows on: %s", error)  # noqa: TRY400
            return
        self.current = segment
        self.on_switch(segment)

    def _create(self) -> SegmentFile:
        path = self._folder / segment_name(self._worker, self._number)
        segment = SegmentFile.create(path, self._session_id, time.time_ns() // 1000)
        self._number += 1
        return segment


def _write_all(fd: int, pieces: Sequence[bytes]) -> int:
    total = sum(map(len, pieces))
    if total <= JOIN_BYTES:
        data = memoryview(b"".join(pieces))
        while data:
            data = data[os.write(fd, data) :]
        return total
    views = [memoryview(piece) for piece in pieces if piece]
    first = 0
    while first < len(views):
        done = os.writev(fd, views[first : first + IOV_MAX])
        while first < len(views) and done >= len(views[first]):
            done -= len(views[first])
            first += 1
        if done:
            views[first] = views[first][done:]
    return total
