"""Start and end of a sandbox's process tree, as seen from the host."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence

_STDERR_BYTES = 4096
_END_S = 10.0


def memory_file(name: str, data: bytes) -> int:
    """Make an unnamed file to hand on, positioned at its start."""
    fd = os.memfd_create(name)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class Launched:
    """bubblewrap and, below it, the supervisor.

    bubblewrap dies with the thread that started it, and the supervisor with bubblewrap: start sandboxes from a thread
    that lives as long as they do (the one that runs the event loop).
    """

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket, info: int) -> None:
        self._process = process
        self.control = control
        self._info = info
        self._stderr = bytearray()
        self._reader = asyncio.create_task(self._read_stderr())
        self.pid: int | None = None
        """The supervisor's, on the host."""

    @classmethod
    async def start(cls, argv: Sequence[str], control: socket.socket, info: int, fds: Sequence[int]) -> "Launched":
        """Run the command with these files open, and nothing of our environment."""
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=fds,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            start_new_session=True,
        )
        return cls(process, control, info)

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(65536):
            self._stderr += data
            del self._stderr[:-_STDERR_BYTES]

    def learn_pid(self) -> None:
        """Read the supervisor's pid, which bubblewrap has written by the time that the supervisor speaks."""
        self.pid = int(json.loads(os.read(self._info, 4096))["child-pid"])
        os.close(self._info)
        self._info = -1

    async def complaint(self) -> str:
        """Wait for the end and give what was said on the way."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._reader), 2.0)
        return self._stderr.decode(errors="replace").strip()

    @property
    def returncode(self) -> int | None:
        """How bubblewrap ended; None: it runs."""
        return self._process.returncode

    async def end(self) -> None:
        """Kill it all and wait until it is dead.

        The supervisor is killed first: it is the init of its namespace, and bubblewrap, its parent, ends only after
        the kernel took down the whole namespace with it.
        """
        if self.pid is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        else:
            self._kill()
        try:
            await asyncio.wait_for(self._process.wait(), _END_S)
        except TimeoutError:
            self._kill()
            await self._process.wait()
        await self._reader
        if self._info >= 0:
            os.close(self._info)
            self._info = -1

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


def plain_env(extra: Mapping[str, str], home: str) -> dict[str, str]:
    """Give the environment of a command: nothing of the host's."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": home,
        "USER": "agent",
        "LOGNAME": "agent",
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp",  # noqa: S108 - the sandbox's own
        **extra,
    }
