"""One writer per data folder: an flock on DATA/lock, held as long as its process lives.

The lock is the kernel's, so it goes with the process however that ends. The file's text (pid, session) only tells a
person, or a reader, who holds it; it proves nothing once the lock is free.
"""

import fcntl
import os
import time
from pathlib import Path

from orchard_proxy.errors import JournalError
from orchard_proxy.record.segment_file import describe

LOCK_NAME = "lock"
TRIES = 3
PAUSE_S = 0.03
"""`live_session` holds the lock for some microseconds; one who wants to write tries again."""


def acquire(data_dir: Path, session_id: bytes) -> int:
    """Take the lock and return its file descriptor; closing it gives the lock back. Raise JournalError when held."""
    path = data_dir / LOCK_NAME
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise JournalError(describe(path, error)) from error
    try:
        _claim(fd, path, session_id)
    except OSError as error:
        os.close(fd)
        raise JournalError(describe(path, error)) from error
    except JournalError:
        os.close(fd)
        raise
    return fd


def _claim(fd: int, path: Path, session_id: bytes) -> None:
    if not _try(fd, fcntl.LOCK_EX):
        raise JournalError(
            f"{path.parent} is in use by process {_holder(fd)}, which holds {path}. Stop that process, "
            "or choose another folder with --data."
        )
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()} {session_id.hex()}\n".encode(), 0)


def _holder(fd: int) -> str:
    words = os.pread(fd, 100, 0).split()
    return words[0].decode("ascii", "replace") if words else "unknown"


def live_session(data_dir: Path) -> bytes | None:
    """Return the session id of the writer that runs now; None when nobody writes."""
    try:
        fd = os.open(data_dir / LOCK_NAME, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        if _try(fd, fcntl.LOCK_SH, tries=1):
            return None
        words = os.pread(fd, 100, 0).split()
        return bytes.fromhex(words[1].decode("ascii")) if len(words) == 2 else b""
    finally:
        os.close(fd)


def _try(fd: int, mode: int, tries: int = TRIES) -> bool:
    for attempt in range(tries):
        try:
            fcntl.flock(fd, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt + 1 < tries:
                time.sleep(PAUSE_S)
        else:
            return True
    return False
