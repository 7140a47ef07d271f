"""Host uids for sandboxes started by root: one uid, one holder, over all processes of the machine.

A slot is a number; its uid is UID_BASE + number, its lock file RUNTIME_DIR/slots/NUMBER. The holder keeps a lock on the
file as long as the sandbox lives. A lock dies with its process, so the slot of a killed run is free again, and who takes
it next clears away what the run left (see limits.py). The range is one that systemd's list of uids calls unused.
"""

import contextlib
import fcntl
import os
from pathlib import Path

UID_BASE = 0x70000000
COUNT = 65536


class NoSlotError(Exception):
    """Every uid of the range is taken."""


class Slot:
    """A uid that is ours until `release`."""

    def __init__(self, number: int, path: Path, fd: int, *, stale: bool) -> None:
        self.number = number
        self.uid = UID_BASE + number
        self.stale = stale
        """A run held it and did not give it back: there may be leftovers."""
        self._path = path
        self._fd: int | None = fd

    def release(self) -> None:
        """Give the uid back. Safe to call twice."""
        if self._fd is None:
            return
        # Removed while still locked: who waits on the old file finds it gone and looks again.
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = None


def acquire(folder: Path) -> Slot:
    """Take a free slot."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for number in range(COUNT):
        if (slot := take(folder, number)) is not None:
            return slot
    raise NoSlotError(f"all {COUNT} uids from {UID_BASE} are taken")


def take(folder: Path, number: int) -> Slot | None:
    """Take this slot, unless it is taken."""
    path = folder / str(number)
    stale = path.exists()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == path.stat().st_ino:
            return Slot(number, path, fd, stale=stale)
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


def stale(folder: Path) -> list[Slot]:
    """Take every slot that a killed run left behind."""
    found = []
    for name in os.listdir(folder) if folder.is_dir() else []:
        with contextlib.suppress(ValueError):
            slot = take(folder, int(name))
            if slot is not None:
                found.append(slot)
    return found
