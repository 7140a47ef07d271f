"""The parent of one command: it starts it, watches the clock, and kills its whole tree when time is up.

One shim per command, forked from the supervisor. It is a child subreaper: orphans of the command, double-forked and
in sessions of their own, become its children and stay attributable. When the leader ends in time, what it left running
goes on, as a child of the supervisor.
"""

import contextlib
import json
import os
import resource
import select
import signal
import stat
import sys
import time
from typing import NoReturn

from env_service.agent import processes

_GRACE_POLL_S = 0.02
OOM_SCORE = "500"
"""Commands die before the supervisor when memory runs out."""


class Command:
    """What to run, and with which files and limits."""

    def __init__(self, header: dict[str, object]) -> None:
        self.argv = [str(part) for part in _list(header["argv"])]
        self.env = {str(key): str(value) for key, value in _dict(header["env"]).items()}
        self.cwd = str(header["cwd"])
        self.timeout_s = float(str(header["timeout_s"]))
        self.grace_s = float(str(header["grace_s"]))
        self.rlimits = {int(key): int(str(value)) for key, value in _dict(header["rlimits"]).items()}


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return value


def _dict(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError("not an object")
    return value


def run(command: Command, stdio: tuple[int, int, int], report: int, control: int) -> NoReturn:
    """Run the command in this process's care and end. Called in a fresh fork."""
    try:
        _close_others({0, 1, 2, *stdio, report, control})
        os.setsid()
        processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
        ended = _Shim(command, stdio, control).watch()
        os.write(report, json.dumps(ended).encode())
    except (OSError, ValueError) as error:  # out of files or memory: said, not passed off as the command's doing
        os.write(report, json.dumps({"error": "no_resources", "message": str(error)}).encode())
    finally:
        os._exit(0)


def _close_others(keep: set[int]) -> None:
    """Close what belongs to the supervisor and to other commands: a pipe end held here would never reach its end."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _become(command: Command, stdio: tuple[int, int, int]) -> NoReturn:
    """Turn this fork into the command."""
    code = 126
    try:
        os.setsid()
        for target, source in enumerate(stdio):
            os.dup2(source, target)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        processes.prctl(processes.PR_SET_DUMPABLE, 1)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(OOM_SCORE)
        for kind, value in command.rlimits.items():
            resource.setrlimit(kind, (value, value))
        _enter(command.cwd)
        os.execvpe(command.argv[0], command.argv, command.env)  # noqa: S606 - running commands is what this is for
    except FileNotFoundError as error:
        code = 127 if error.filename != command.cwd else 126
        _complain(error)
    except (OSError, ValueError) as error:
        _complain(error)
    finally:
        os._exit(code)


def _enter(folder: str) -> None:
    """Go there; where an earlier command closed the folder, open it: a grader starts all the same."""
    try:
        os.chdir(folder)
    except PermissionError:
        os.chmod(folder, stat.S_IMODE(os.stat(folder).st_mode) | stat.S_IRWXU)
        os.chdir(folder)


def _complain(error: Exception) -> None:
    os.write(2, f"orchard: {error}\n".encode(errors="replace"))


class _Shim:
    def __init__(self, command: Command, stdio: tuple[int, int, int], control: int) -> None:
        self._command = command
        self._control = control
        self._status: int | None = None
        self._killed_by: str | None = None
        self._escalated = False
        self._wake, wake_write = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake_write, False)
        self._poll = select.poll()
        for fd in (self._wake, self._control):
            self._poll.register(fd, select.POLLIN)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._start = time.monotonic()
        self._leader = os.fork()
        if self._leader == 0:
            _become(command, stdio)
        for fd in stdio:
            os.close(fd)

    def watch(self) -> dict[str, object]:
        """Wait for the leader, the deadline or the caller, and say how it went."""
        deadline = self._start + self._command.timeout_s
        while self._status is None and self._killed_by is None:
            left = deadline - time.monotonic()
            if left <= 0:
                self._end_in_time()
                break
            if self._control in self._wait(left):
                self._kill("caller")
                break
            self._reap()
        return self._report()

    def _wait(self, seconds: float) -> list[int]:
        # Not select(): with many files open, these may have numbers that it cannot take.
        ready = [fd for fd, _ in self._poll.poll(min(seconds, 3600.0) * 1000)]
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        return ready

    def _reap(self) -> None:
        ended = processes.reap()
        if self._leader in ended:
            self._status = ended[self._leader]

    def _end_in_time(self) -> None:
        """Ask the whole tree to end, then make it."""
        self._reap()
        if self._status is not None:
            return
        self._killed_by = "timeout"
        tree = processes.descendants(os.getpid())
        processes.signal_all(tree, signal.SIGTERM)
        processes.signal_all(tree, signal.SIGCONT)
        until = time.monotonic() + self._command.grace_s
        while (left := until - time.monotonic()) > 0:
            self._reap()
            if not processes.descendants(os.getpid()):
                return
            if self._control in self._wait(min(left, _GRACE_POLL_S)):
                break
        self._escalated = True
        self._kill("timeout")

    def _kill(self, by: str) -> None:
        self._killed_by = by
        ended = processes.kill_tree(os.getpid())
        if self._status is None:
            self._status = ended.get(self._leader)

    def _report(self) -> dict[str, object]:
        self._reap()
        code = None if self._status is None else os.waitstatus_to_exitcode(self._status)
        return {
            "exit_code": code if code is not None and code >= 0 else None,
            "signal": -code if code is not None and code < 0 else None,
            "timed_out": self._killed_by == "timeout",
            "killed_by": self._killed_by,
            "escalated": self._escalated,
            "duration_s": round(time.monotonic() - self._start, 6),
            "lingering": len(processes.descendants(os.getpid())),
        }


if sys.platform != "linux":
    raise ImportError("process trees are killed by way of Linux' /proc")
