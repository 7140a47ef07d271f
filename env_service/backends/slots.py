"""Host uids for sandboxes started by root: one uid, one holder, over all processes of the machine.

A slot is a number; its uid is UID_BASE + number, its lock file RUNTIME_DIR/slots/NUMBER. The holder keeps a lock on the
file as long as the sandbox lives. A lock dies with its process, so the slot of a killed run is free again, and who
takes it next clears away what the run left (see limits.py). The range is one that systemd's list of uids calls unused.
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

    def __init__(self, number: int, uid: int, path: Path, fd: int, *, stale: bool) -> None:
        self.number = number
        self.uid = uid
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


def acquire(folder: Path, first: int = 0) -> Slot:
    """Take a free slot, looking from `first` on."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    base, count = uid_range(Path("/proc/self/uid_map").read_text())
    for step in range(count):
        if (slot := take(folder, (first + step) % count, base)) is not None:
            return slot
    raise NoSlotError(f"all {count} uids from {base} are taken")


def uid_range(uid_map: str) -> tuple[int, int]:
    """Choose first uid and number of uids: the range above, or, in a container that has no such uids, some it has."""
    spans = [(int(start), int(length)) for start, _, length in (line.split() for line in uid_map.splitlines())]
    if any(start <= UID_BASE and start + length >= UID_BASE + COUNT for start, length in spans):
        return UID_BASE, COUNT
    start, length = max(spans, key=lambda span: span[1])
    return start + length // 2, max(1, length // 4)


def take(folder: Path, number: int, base: int = UID_BASE) -> Slot | None:
    """Take this slot, unless it is taken."""
    path = folder / str(number)
    stale = path.exists()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == path.stat().st_ino:
            return Slot(number, base + number, path, fd, stale=stale)
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


def stale(folder: Path) -> list[Slot]:
    """Take every slot that a killed run left behind."""
    found = []
    for name in [path.name for path in folder.iterdir()] if folder.is_dir() else []:
        with contextlib.suppress(ValueError):
            slot = take(folder, int(name))
            if slot is not None:
                found.append(slot)
    return found
