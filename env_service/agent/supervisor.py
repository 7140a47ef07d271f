"""Process 1 of a sandbox: starts commands, moves files, forwards the proxy, and outlives whatever the commands do.

One thread, one selector, no waiting anywhere. As process 1 of its pid namespace it cannot be killed from inside, every
orphan ends up as its child, and when it ends, the kernel ends the whole sandbox. It ends when its control socket does.
Commands inherit none of its files, and as it is not dumpable they cannot open them by way of /proc.
"""

import os
import selectors
import signal
import socket
import sys
import time
from typing import NoReturn

from env_service.agent import files, frames, ipc, processes
from env_service.agent.errors import FileError
from env_service.agent.execution import Execution
from env_service.agent.forward import Forwarder, most_connections

_RECEIVE_BYTES = 256 * 1024


class _HostGone(Exception):  # noqa: N818 - not an error: the end
    """The other end of the control socket was closed."""


class Supervisor:
    """Answer the host's requests until it closes the socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._control.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._decoder = frames.Decoder()
        self._out = bytearray()
        self._executions: dict[int, Execution] = {}
        self._forwarder: Forwarder | None = None
        self._wake, wake_write = os.pipe()
        for fd in (self._wake, wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._control, selectors.EVENT_READ, self._on_control)
        self._selector.register(self._wake, selectors.EVENT_READ, self._on_child)

    def serve(self) -> None:
        """Run until the host is gone."""
        try:
            while True:
                for key, mask in self._selector.select(self._tick()):
                    key.data(mask)
        except _HostGone:
            return

    def _tick(self) -> float | None:
        now = time.monotonic()
        waits = [execution.tick(now) for execution in list(self._executions.values())]
        if self._forwarder is not None:
            waits.append(self._forwarder.tick())
        known = [wait for wait in waits if wait is not None]
        return min(known) if known else None

    # --- the control socket

    def _on_control(self, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush()
            if mask & selectors.EVENT_READ:
                self._receive()
        except BlockingIOError:
            return
        except (ConnectionError, frames.FrameError) as error:
            raise _HostGone from error

    def _receive(self) -> None:
        data = self._control.recv(_RECEIVE_BYTES)
        if not data:
            raise _HostGone
        for header, body in self._decoder.feed(data):
            self._handle(header, body)

    def _send(self, header: frames.Header, body: bytes = b"") -> None:
        self._out += frames.encode(header, body)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: self._control.send(self._out[: 1 << 20])]
        except BlockingIOError:
            pass
        except ConnectionError as error:
            raise _HostGone from error
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        self._selector.modify(self._control, mask, self._on_control)

    # --- requests

    def _handle(self, header: frames.Header, body: bytes) -> None:
        ref = int(str(header["id"]))
        try:
            answer, data = self._answer(ref, header, body)
        except FileError as error:
            answer, data = {"error": error.code, "message": str(error)}, b""
        except OSError as error:
            answer, data = {"error": files.code_of(error), "message": str(error)}, b""
        except (KeyError, TypeError, ValueError) as error:
            answer, data = {"error": "bad_request", "message": repr(error)}, b""
        if answer is not None:
            self._send({"id": ref, **answer}, data)

    def _answer(self, ref: int, header: frames.Header, body: bytes) -> tuple[frames.Header | None, bytes]:
        """Do one request; None: the answer comes later."""
        match header["op"]:
            case "exec":
                self._executions[ref] = Execution(self._selector, header, body, lambda *end: self._ended(ref, *end))
                return None, b""
            case "cancel":
                if (execution := self._executions.get(int(str(header["target"])))) is not None:
                    execution.cancel()
            case "kill_all":
                return {"killed": self._kill_all()}, b""
            case "forward":
                port, target = int(str(header["port"])), str(header["target"])
                self._forwarder = Forwarder(self._selector, port, target, most_connections())
            case "ping":
                pass
            case _:
                return files.answer(header, body)
        return {}, b""

    def _ended(self, ref: int, header: frames.Header, body: bytes) -> None:
        del self._executions[ref]
        self._send({"id": ref, **header}, body)

    # --- children

    def _on_child(self, _mask: int) -> None:
        try:
            os.read(self._wake, 4096)
        except BlockingIOError:
            return
        for pid in processes.reap():
            for execution in list(self._executions.values()):
                if execution.shim == pid:
                    self._shim_ended(execution)

    def _shim_ended(self, execution: Execution) -> None:
        if not execution.shim_ended():
            self._sweep()

    def _sweep(self) -> None:
        """Kill all that no live shim answers for: a command killed its shim."""
        spared: set[int] = {os.getpid()}
        for execution in self._executions.values():
            if execution.shim is not None:
                spared |= {execution.shim} | processes.descendants(execution.shim)
        for _ in range(200):
            left = processes.descendants(os.getpid()) - spared
            if not left:
                return
            processes.signal_all(left, signal.SIGKILL)
            processes.reap()
            time.sleep(0.002)

    def _kill_all(self) -> int:
        """Kill every process of the namespace but this one, at once: kill(-1) cannot be outrun by forks.

        System V objects outlive processes, and their memory counts: they go too.
        """
        if os.getpid() != 1:
            raise RuntimeError("outside a pid namespace of its own, kill(-1) would end the machine")
        before = len(processes.descendants(os.getpid()))
        for execution in self._executions.values():
            execution.killed()
        for _ in range(500):
            if not processes.descendants(os.getpid()):
                break
            processes.signal_all([-1], signal.SIGKILL)
            time.sleep(0.002)
        ipc.remove_all()
        return before


def main(control_fd: int) -> NoReturn:
    """Be the supervisor; `control_fd` is our end of the control socket."""
    if os.getpid() != 1:
        raise SystemExit("the supervisor is process 1 of a sandbox, nothing else")
    # Process 1 gets only the signals that it handles; without this, a command could interrupt Python by SIGINT.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
    processes.prctl(processes.PR_SET_DUMPABLE, 0)
    os.set_inheritable(control_fd, False)
    supervisor = Supervisor(socket.socket(fileno=control_fd))
    supervisor.serve()
    sys.stderr.flush()
    os._exit(0)
