"""One command as the supervisor sees it: its pipes, its shim, and the moment at which its result is complete.

The pipes are always read, so no command hangs on a full one; beyond the limit the middle is dropped. The result is sent
when the shim reported and the pipes ended, or fell silent: what a command leaves running may hold them open for ever.
Then they go on being read, into nothing.
"""

import contextlib
import json
import os
import selectors
import time
from collections.abc import Callable

from env_service.agent import frames, processes, shim
from env_service.agent.capture import Capture

_READ_BYTES = 256 * 1024
_QUIET_S = 0.1
_DRAIN_S = 0.5
_OVERDUE_S = 5.0
"""How much later than planned a shim may report; a stopped one never does."""

Done = Callable[[frames.Header, bytes], None]


class Execution:
    """A started command."""

    def __init__(self, selector: selectors.BaseSelector, header: frames.Header, stdin: bytes, done: Done) -> None:
        self._selector = selector
        self._done = done
        self._captures: dict[int, Capture] = {}
        self._report = bytearray()
        self._ended: frames.Header | None = None
        self._killed_by: str | None = None
        self._finished = False
        command = shim.Command(header)
        self._started = time.monotonic()
        self._start(command, stdin, int(str(header["output_bytes"])))
        self._overdue = time.monotonic() + command.timeout_s + command.grace_s + _OVERDUE_S
        self._quiet_at = self._drained_at = 0.0

    def _start(self, command: shim.Command, stdin: bytes, output_bytes: int) -> None:
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            pipes = [self._pipe(theirs, ours, mine) for mine in (1, 0, 0, 0, 1)]
            (self._stdin, for_stdin), (out, for_out), (err, for_err), (report, for_report), (control, for_control) = (
                pipes
            )
            pid = os.fork()
            if pid == 0:
                shim.run(command, (for_stdin, for_out, for_err), for_report, for_control)
            ours.pop_all()
        self.shim: int | None = pid
        self._control = control
        self._outputs: tuple[int, ...] = (out, err)
        for fd in self._outputs:
            self._captures[fd] = Capture(output_bytes)
            self._selector.register(fd, selectors.EVENT_READ, lambda _mask, fd=fd: self._drain(fd))
        self._report_fd = report
        self._to_write = memoryview(stdin)
        if stdin:
            self._selector.register(self._stdin, selectors.EVENT_WRITE, self._feed)
        else:
            os.close(self._stdin)

    @staticmethod
    def _pipe(theirs: contextlib.ExitStack, ours: contextlib.ExitStack, mine: int) -> tuple[int, int]:
        """Make a pipe whose end `mine` we keep, if all goes well; the other is closed here once the shim has it."""
        ends = os.pipe()
        ours.callback(os.close, ends[mine])
        theirs.callback(os.close, ends[1 - mine])
        os.set_blocking(ends[mine], False)
        return ends[mine], ends[1 - mine]

    # --- pipes

    def _feed(self, _mask: int) -> None:
        try:
            self._to_write = self._to_write[os.write(self._stdin, self._to_write[:_READ_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:  # it does not want the rest
            self._to_write = self._to_write[:0]
        if not self._to_write:
            self._stop_feeding()

    def _stop_feeding(self) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._stdin)
            os.close(self._stdin)

    def _drain(self, fd: int) -> bool:
        """Read once; say whether there was anything."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(fd)
            os.close(fd)
            self._outputs = tuple(other for other in self._outputs if other != fd)
            self._finish_if_complete()
        elif not self._finished:
            self._captures[fd].feed(data)
            self._quiet_at = time.monotonic() + _QUIET_S
        return bool(data)

    # --- the shim

    def cancel(self) -> None:
        """Have the tree killed; the result comes as always."""
        with contextlib.suppress(OSError):
            os.write(self._control, b"k")

    def killed(self) -> None:
        """Take note that kill_all ends this one: its shim will not report."""
        self._killed_by = self._killed_by or "caller"

    def shim_ended(self) -> bool:
        """Read the shim's report; False when there is none or a failed one, and its tree may live on."""
        self.shim = None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._report_fd, 65536):
                self._report += data
        os.close(self._report_fd)
        os.close(self._control)
        if self._report:
            self._ended = json.loads(self._report)
        elif self._killed_by is not None:
            self._ended = {"exit_code": None, "signal": 9, "killed_by": self._killed_by, "escalated": True}
            self._ended["timed_out"] = self._killed_by == "timeout"
            self._ended["duration_s"] = round(time.monotonic() - self._started, 6)
        else:
            self._ended = {"error": "shim_killed", "message": "the command killed the process that watched over it"}
        self._settle()
        return bool(self._report) and "error" not in self._ended

    def _settle(self) -> None:
        self._stop_feeding()
        now = time.monotonic()
        self._quiet_at, self._drained_at = now + _QUIET_S, now + _DRAIN_S
        self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        if self._ended is not None and not self._outputs and not self._finished:
            self._finish()

    def _finish(self) -> None:
        assert self._ended is not None
        self._finished = True
        out, err = self._captures.values()
        stdout, stderr = out.value(), err.value()
        sizes = {"stdout_kept": len(stdout), "stdout_bytes": out.total_bytes, "stderr_bytes": err.total_bytes}
        self._captures.clear()
        self._done({**self._ended, **sizes}, stdout + stderr)

    # --- time

    def tick(self, now: float) -> float | None:
        """Do what is due; say how soon to come back."""
        if self._finished:
            return None
        if self._ended is None:
            if now < self._overdue:
                return self._overdue - now
            self._give_up()
            return _OVERDUE_S
        due = min(self._quiet_at, self._drained_at)
        if now < due:
            return due - now
        self._finish()
        return None

    def _give_up(self) -> None:
        """Kill a shim that is late, with its tree: the command stopped it, or the machine is very slow."""
        self._overdue = time.monotonic() + _OVERDUE_S
        self._killed_by = "timeout"
        if self.shim is not None:
            tree = processes.descendants(self.shim)
            processes.signal_all([*tree, self.shim], 9)
