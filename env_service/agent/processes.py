"""Process trees by /proc: who descends from whom, and how to kill a tree that fights back.

Exact as long as the root of the tree is a child subreaper: then nothing that it started can leave its tree, whatever
it forks, whichever session it makes. Zombies do not count: they are dead.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable

PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
_DEAD = frozenset("ZXx")
_STOP_PASSES_S = 2.0

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Set a process attribute."""
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def parents() -> dict[int, int]:
    """Map each live process to its parent."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if len(fields) > 1 and fields[0].decode() not in _DEAD:
            found[int(name)] = int(fields[1])
    return found


def descendants(root: int) -> set[int]:
    """Give every live process below `root`, without it."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        below = [pid for pid in children.get(todo.pop(), []) if pid not in found]
        found.update(below)
        todo += below
    return found


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to each; the dead are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def reap() -> dict[int, int]:
    """Collect every child that ended: pid → wait status."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def kill_tree(root: int, *, limit_s: float = 10.0) -> dict[int, int]:
    """Kill everything below `root`, which is the caller; give the children that were reaped.

    First all are stopped, until no new one shows up: a stopped process forks no more, so a fork loop cannot outrun
    the kill that follows.
    """
    start = time.monotonic()
    stopped: set[int] = set()
    while (fresh := descendants(root) - stopped) and time.monotonic() - start < _STOP_PASSES_S:
        signal_all(fresh, signal.SIGSTOP)
        stopped |= fresh
    ended: dict[int, int] = {}
    while (left := descendants(root)) and time.monotonic() - start < limit_s:
        signal_all(left, signal.SIGKILL)
        ended.update(reap())
        time.sleep(0.002)
    ended.update(reap())
    return ended
