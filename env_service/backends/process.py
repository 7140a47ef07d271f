"""Start and end of a sandbox's process tree, as seen from the host."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Sequence

_STDERR_BYTES = 4096
_END_S = 10.0
_SILENT_S = 2.0


def memory_file(name: str, data: bytes) -> int:
    """Make an unnamed file to hand on, positioned at its start."""
    fd = os.memfd_create(name)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class Launched:
    """bubblewrap and, below it, the supervisor.

    bubblewrap dies with the thread that started it, and the supervisor with bubblewrap: the thread that runs the event
    loop must live as long as its sandboxes do. The end is learned from a pidfd: no thread waits for it.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", control: socket.socket, info: int) -> None:
        self.control = control
        self.pid: int | None = None
        """The supervisor's, on the host."""
        self._process = process
        self._info: int | None = info
        self._said = bytearray()
        self._ended = asyncio.Event()
        self._silent = asyncio.Event()
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        self._pidfd = os.pidfd_open(process.pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(process.stderr, self._on_stderr)
        loop.add_reader(self._pidfd, self._on_end)

    @classmethod
    def start(cls, argv: Sequence[str], control: socket.socket, info: int, fds: Sequence[int]) -> "Launched":
        """Run the command with these files open, and nothing of our environment."""
        process = subprocess.Popen(  # noqa: S603 - our own words
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=fds,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            start_new_session=True,
        )
        return cls(process, control, info)

    def _on_stderr(self) -> None:
        assert self._process.stderr is not None
        try:
            data = os.read(self._process.stderr.fileno(), 65536)
        except BlockingIOError:
            return
        self._said += data
        del self._said[:-_STDERR_BYTES]
        if not data:
            asyncio.get_running_loop().remove_reader(self._process.stderr)
            self._process.stderr.close()
            self._silent.set()

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        # A bubblewrap that was killed before it had tied the supervisor to itself leaves it alive, or on its way; the
        # end of the control socket ends it, and whoever waits for its answer.
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)
        self._ended.set()

    def learn_pid(self) -> None:
        """Read the supervisor's pid, which bubblewrap has written by the time that the supervisor speaks."""
        if self._info is None:
            return
        os.set_blocking(self._info, False)
        with contextlib.suppress(BlockingIOError, ValueError):
            self.pid = int(json.loads(os.read(self._info, 4096))["child-pid"])
        os.close(self._info)
        self._info = None

    @property
    def said(self) -> str:
        """What was said on stderr so far, its end."""
        return self._said.decode(errors="replace").strip()

    async def complaint(self) -> str:
        """Wait a moment for the end, and give what was said on the way."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._silent.wait(), 2.0)
        return self.said

    async def end(self) -> None:
        """Kill it all and wait until it is dead.

        The supervisor is killed first: it is the init of its namespace, and bubblewrap, its parent, ends only after
        the kernel took down the whole namespace with it.
        """
        self.learn_pid()
        if not self._ended.is_set():
            self._kill(self.pid or self._process.pid)
        try:
            await asyncio.wait_for(self._ended.wait(), _END_S)
        except TimeoutError:
            self._kill(self._process.pid)
            await self._ended.wait()
        try:
            await asyncio.wait_for(self._silent.wait(), _SILENT_S)
        except TimeoutError:
            self._hush()

    def _hush(self) -> None:
        """Stop listening to what was cut off half-way in its start: it waits for ever for a parent that is dead.

        Where cgroups count, their removal kills it; else it is a sleeping process of ours that holds nothing.
        """
        assert self._process.stderr is not None
        asyncio.get_running_loop().remove_reader(self._process.stderr)
        self._process.stderr.close()
        self._silent.set()

    @staticmethod
    def _kill(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
