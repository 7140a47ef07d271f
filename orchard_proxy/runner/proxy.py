"""The proxy of a run: a child of ours that is started again when it dies, or one elsewhere that we relay to.

Invariant: the socket of a run is one and the same from its start to its end, since sandboxes have it mounted. We hold
it open and the child inherits it, so that who calls while no server is there waits instead of failing. `generation`
counts how often the server behind it began anew: a rollout can tell whether that happened under its feet.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from orchard_proxy.errors import OrchardError, UsageError
from orchard_proxy.runner.relay import Relay, short_socket

logger = logging.getLogger(__name__)

_START_S = 30.0
_LOCKED_S = 45.0
"""How long the proxy of a killed runner may take to let go of DATA: it drains for up to 30 s."""
_STOP_S = 40.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
_HEALTHY_S = 1.0
"""A server that died sooner than this after its start may never live."""
_PR_SET_PDEATHSIG = 1
_BACKLOG = 1024


class Proxy(Protocol):
    """What a run needs of its proxy."""

    @property
    def url(self) -> str:
        """Root of the control plane, at this moment."""
        ...

    @property
    def admin_key(self) -> str:
        """Key of the control plane."""
        ...

    @property
    def socket(self) -> Path:
        """Unix socket of the data plane."""
        ...

    @property
    def generation(self) -> int:
        """How many servers there were before this one."""
        ...


class RemoteProxy:
    """A proxy that somebody else runs. Our socket leads to its data plane."""

    generation = 0

    def __init__(self, url: str, admin_key: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.admin_key = admin_key
        self._folder = Path(tempfile.mkdtemp(prefix="orchard-"))
        self.socket = self._folder / "proxy.sock"
        self._relay = Relay(self.socket, self.url)

    async def __aenter__(self) -> Self:
        await self._relay.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._relay.__aexit__(kind, error, trace)
        shutil.rmtree(self._folder, ignore_errors=True)


class ProxyChild:
    """`orchard serve` as a child process. It dies with us, whatever ends us.

    After `most_deaths` in a row, each soon after the start, it is given up.
    """

    def __init__(
        self, data_dir: Path, flags: Sequence[str], *, env: Mapping[str, str] | None = None, most_deaths: int = 20
    ) -> None:
        self.generation = 0
        self._most_deaths = most_deaths
        self._data_dir = data_dir
        self._run_dir = data_dir / "run"
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._spare = Path(tempfile.mkdtemp(prefix="orchard-"))
        self.socket = short_socket(self._run_dir, "proxy.sock", self._spare)
        self._listener: socket.socket | None = None
        self._lock = (self._run_dir / "lock").open("w")
        self._note = self._run_dir / "spare"
        self._port_file = self._run_dir / "proxy.port"
        self._log = self._run_dir / "serve.log"
        self._flags = list(flags)
        self._env = {**os.environ, **(env or {})}
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._port = 0
        self.failed: asyncio.Future[None] | None = None
        """Gets an exception when the server cannot be kept alive."""

    @property
    def url(self) -> str:
        """Root of the server that runs, or ran last."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def admin_key(self) -> str:
        """The key that the server read or made."""
        given = self._env.get("ORCHARD_SERVE__ADMIN_KEY")
        return given or (self._data_dir / "admin.key").read_text().strip()

    @property
    def pid(self) -> int | None:
        """Process id, while there is one."""
        return None if self._process is None else self._process.pid

    async def __aenter__(self) -> Self:
        try:
            self._claim()
            await self._start_patiently()
        except BaseException:
            self._clear()
            raise
        self.failed = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep(), name="proxy child")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        assert self.failed is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self.failed.cancel()
        await self._stop()
        self._clear()

    def _claim(self) -> None:
        """Take DATA for this runner, and open the socket: nobody alive can have it now."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"another `orchard run` works on {self._data_dir}; give this one another --data, or use --proxy"
            ) from error
        _sweep(self._note, self._spare)
        self._listener = _listen(self.socket)

    def _clear(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self.socket.unlink(missing_ok=True)
            self._note.unlink(missing_ok=True)
        self._lock.close()
        shutil.rmtree(self._spare, ignore_errors=True)

    async def _start_patiently(self) -> None:
        """Start; where a killed runner's proxy is still ending, wait for that."""
        until = asyncio.get_running_loop().time() + _LOCKED_S
        while True:
            try:
                await self._start()
            except (_LockedError, _KilledError) as error:
                if asyncio.get_running_loop().time() > until:
                    raise OrchardError(str(error)) from error
                logger.info("the proxy is started again: %s", error)
            else:
                return
            await asyncio.sleep(0.5)

    async def _start(self) -> None:
        self._port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "orchard_proxy.cli.main", "serve", "--data", str(self._data_dir)]
        assert self._listener is not None
        inherited = self._listener.fileno()
        ours = ["--host", "127.0.0.1", "--port", "0", "--port-file", str(self._port_file), "--uds-fd", str(inherited)]
        with self._log.open("ab") as log:
            began = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *command,
                *self._flags,
                *ours,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self._env, "ORCHARD_SERVE__OPEN": "false"},  # An agent must not make up rollouts.
                pass_fds=(inherited,),
                start_new_session=True,  # Ctrl-C is for us; the proxy ends after the last rollout did.
                preexec_fn=_dies_with(os.getpid()),
            )
        await self._wait_for_port(began)

    async def _wait_for_port(self, log_began: int) -> None:
        assert self._process is not None
        until = asyncio.get_running_loop().time() + _START_S
        while not self._port_file.exists():
            if self._process.returncode is not None:
                self._raise_start(log_began)
            if asyncio.get_running_loop().time() > until:
                self._process.kill()
                raise OrchardError(f"orchard serve did not start within {_START_S:g} s; see {self._log}")
            await asyncio.sleep(0.02)
        self._port = int(self._port_file.read_text())

    def _raise_start(self, log_began: int) -> None:
        assert self._process is not None
        said = self._log.read_bytes()[log_began:].decode(errors="replace").strip().splitlines() or ["it said nothing"]
        last = said[-1].removeprefix("orchard: ")
        if "is in use by process" in last:
            raise _LockedError(last)
        if self._process.returncode is not None and self._process.returncode < 0:
            raise _KilledError(f"orchard serve was killed by signal {-self._process.returncode} while it started")
        if self._process.returncode == 2:
            raise UsageError(f"orchard serve: {last}")
        raise OrchardError(f"orchard serve ended with status {self._process.returncode}: {last} (see {self._log})")

    async def _keep(self) -> None:
        """Start the server again each time it dies."""
        clock = asyncio.get_running_loop().time
        wait_s, deaths, started = _FIRST_WAIT_S, 0, clock()
        while True:
            assert self._process is not None
            status = await self._process.wait()
            deaths = 0 if clock() - started > _HEALTHY_S else deaths + 1
            wait_s = _FIRST_WAIT_S if deaths == 0 else min(2 * wait_s, _LONGEST_WAIT_S)
            logger.warning("the proxy ended with status %s; starting it again", status)
            self.generation += 1
            await asyncio.sleep(wait_s)
            started = clock()
            try:
                await self._start()
            except (OrchardError, OSError) as error:
                logger.warning("the proxy could not be started again: %s", error)
                if deaths >= self._most_deaths:
                    self._give_up(error)
                    return

    def _give_up(self, error: Exception) -> None:
        assert self.failed is not None
        if not self.failed.done():
            self.failed.set_exception(OrchardError(f"the proxy cannot be kept alive: {error}"))

    async def _stop(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            logger.warning("the proxy did not end in %g s and is killed; its journal is whole", _STOP_S)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def _sweep(note: Path, spare: Path) -> None:
    """Remove the folder that a killed runner left among the temporary files, and note ours."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        old = Path(note.read_text())
        if old.parent == spare.parent and old.name.startswith("orchard-"):
            (old / "proxy.sock").unlink(missing_ok=True)
            old.rmdir()
    note.write_text(str(spare))


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # Left by a runner that was killed.
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(_BACKLOG)
    path.chmod(0o666)  # Sandboxes run as other users; a rollout's key is what they need besides.
    return listener


class _LockedError(OrchardError):
    """Another server holds DATA: that of a killed runner, which is still ending."""


class _KilledError(OrchardError):
    """Somebody killed the server before it was there."""


def _dies_with(parent: int) -> "_Prelude":
    return _Prelude(parent, ctypes.CDLL(None, use_errno=True).prctl)


class _Prelude:
    """Runs in the child between fork and exec: SIGTERM when the parent is gone, however it went."""

    def __init__(self, parent: int, prctl: "ctypes._NamedFuncPointer") -> None:
        self._parent = parent
        self._prctl = prctl

    def __call__(self) -> None:
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != self._parent:
            os._exit(1)
