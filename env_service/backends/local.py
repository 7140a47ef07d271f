"""Sandboxes on this machine, by bubblewrap. No daemon; root is not needed, but makes more possible.

What is enforced is in `LocalBackend.check`. What cannot be enforced is an error: there is no way from here to a bare
subprocess.
"""

import asyncio
import contextlib
import os
import resource
import socket
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from env_service import limits as cgroup
from env_service import seccomp
from env_service.agent import frames
from env_service.backends import bwrap, faults, host, probe, slots, uploads
from env_service.backends.channel import Channel, ChannelClosedError
from env_service.backends.launcher import Staging
from env_service.backends.process import Launched, memory_file, plain_env
from orchard_proxy.schema.enums import Blame, Phase
from orchard_proxy.schema.sandbox import MIB, ExecResult, Mount, Sandbox, SandboxSpec

_START_S = 60.0
_LONGEST_EXEC_S = 24 * 3600.0
"""What a command gets when no limit is named."""
_START = "import sys; sys.path.insert(0, {root!r}); from env_service.agent.supervisor import main; main({fd})"


class LocalSandbox:
    """One bubblewrap sandbox and its supervisor."""

    def __init__(self, backend: "LocalBackend", spec: SandboxSpec, name: str) -> None:
        self._backend = backend
        self._spec = spec
        self._name = name
        self._slot: slots.Slot | None = None
        self._cgroups: list[Path] = []
        self._launched: Launched | None = None
        self._channel: Channel | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def spec(self) -> SandboxSpec:
        """What was asked for."""
        return self._spec

    @property
    def pid(self) -> int:
        """The host's pid of the supervisor."""
        assert self._launched is not None
        assert self._launched.pid is not None
        return self._launched.pid

    # --- start

    async def start(self) -> None:
        """Start it; on failure nothing is left behind."""
        try:
            await self._start()
        except (OSError, slots.NoSlotError, ChannelClosedError) as error:
            said = await self._launched.complaint() if self._launched else ""
            await self.close()
            raise faults.create_failed(said or str(error)) from error
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        facts = self._backend.host
        if facts.root:
            self._slot = slots.acquire(Path(host.RUNTIME_DIR) / "slots")
            if self._slot.stale:
                await asyncio.to_thread(cgroup.remove, self._backend.cgroups.folders(str(self._slot.number)))
            self._cgroups = cgroup.make(self._backend.cgroups, str(self._slot.number), self._spec.limits)
        with contextlib.ExitStack() as stack:
            self._launched = await self._launch(stack)
        self._channel = await Channel.over(self._launched.control)
        async with asyncio.timeout(_START_S):
            await self._channel.request({"op": "ping"})
            self._launched.learn_pid()
            if self._spec.proxy_socket is not None:
                ask: frames.Header = {"op": "forward", "port": self._spec.proxy_port, "target": bwrap.PROXY_SOCKET}
                await self._request(ask, phase=Phase.CREATE)

    async def _launch(self, stack: contextlib.ExitStack) -> Launched:
        """Build the command line and run it. `stack` closes what only the child needs."""
        facts = self._backend.host
        assert facts.bwrap is not None
        ours, theirs = socket.socketpair()
        stack.callback(theirs.close)
        info_read, info_write = os.pipe()
        stack.callback(os.close, info_write)
        data = {f"/etc/{name}": text for name, text in bwrap.MADE_UP.items()}
        data["/etc/passwd"] = bwrap.passwd(self._spec.home)
        files = {target: memory_file("orchard", text.encode()) for target, text in data.items()}
        filter_fd = memory_file("orchard-seccomp", seccomp.program(facts.machine))
        for fd in (*files.values(), filter_fd):
            stack.callback(os.close, fd)
        staging = Staging()
        staging.join([str(folder) for folder in self._cgroups])
        layout = self._layout(staging, files, filter_fd, info_write)
        command = self._supervisor(theirs.fileno())
        words = [self._bwrap(staging, facts.bwrap), *bwrap.argv(self._spec, layout, command)]
        if self._slot is not None:
            words = staging.argv(self._slot.uid, words)
        return await Launched.start(words, ours, info_read, (theirs.fileno(), info_write, filter_fd, *files.values()))

    def _layout(self, staging: Staging, files: Mapping[str, int], filter_fd: int, info_fd: int) -> bwrap.Layout:
        facts = self._backend.host
        binds = [Mount(source=facts.agent, target=f"{bwrap.AGENT_ROOT}/env_service/agent")]
        if not _inside(facts.prefix, "/usr"):
            binds.append(Mount(source=facts.prefix, target=facts.prefix))
        if self._spec.proxy_socket is not None:
            binds.append(Mount(source=self._spec.proxy_socket, target=bwrap.PROXY_SOCKET))
        binds += self._spec.mounts
        if self._slot is not None:
            binds = [Mount(source=staging.bind(bind.source), target=bind.target) for bind in binds]
        return bwrap.Layout(
            system=facts.system,
            etc=facts.etc,
            binds=binds,
            root=None,
            data=files,
            seccomp_fd=filter_fd,
            info_fd=info_fd,
            scratch_bytes=bwrap.scratch(self._spec),
        )

    def _bwrap(self, staging: Staging, path: str) -> str:
        """Name bubblewrap as the sandbox's uid can reach it; PyPI's has a library beside its package."""
        if self._slot is None:
            return path
        package = Path(path).parent.parent
        libraries = package.with_name(package.name + ".libs")
        if not libraries.is_dir():
            return staging.bind(path)
        staging.bind_at(str(libraries), libraries.name)
        return f"{staging.bind_at(str(package), package.name)}/_bin/{Path(path).name}"

    def _supervisor(self, control_fd: int) -> list[str]:
        code = _START.format(root=bwrap.AGENT_ROOT, fd=control_fd)
        return [self._backend.host.interpreter, "-I", "-S", "-B", "-c", code]

    # --- requests

    async def _request(
        self, header: frames.Header, body: bytes = b"", *, phase: Phase = Phase.RUN
    ) -> tuple[frames.Header, bytes]:
        if self._channel is None or self._closing is not None:
            raise faults.closed(self._spec.sandbox_id)
        try:
            answer, data = await self._channel.request(header, body)
        except ChannelClosedError as error:
            raise self._dead() from error
        if "error" in answer:
            raise faults.refused(answer, phase)
        return answer, data

    def _oom_kills(self) -> int:
        return cgroup.oom_kills(self._backend.cgroups, str(self._slot.number)) if self._slot is not None else 0

    def _dead(self) -> Exception:
        if self._closing is not None:
            return faults.closed(self._spec.sandbox_id)
        return faults.dead(self._spec.sandbox_id, out_of_memory=self._oom_kills() > 0)

    async def exec(
        self,
        argv: Sequence[str] | str,
        *,
        timeout_s: float | None = None,
        grace_s: float = 2.0,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Run a command and wait for its end, at most `timeout_s` (default: a day)."""
        if self._channel is None or self._closing is not None:
            raise faults.closed(self._spec.sandbox_id)
        header: frames.Header = {
            "op": "exec",
            "argv": ["/bin/sh", "-c", argv] if isinstance(argv, str) else list(argv),
            "env": plain_env({**self._spec.env, **(env or {})}, self._spec.home),
            "cwd": self._path(cwd or self._spec.workdir),
            "timeout_s": _LONGEST_EXEC_S if timeout_s is None else timeout_s,
            "grace_s": grace_s,
            "output_bytes": self._spec.limits.output_bytes,
            "rlimits": self._backend.rlimits(self._spec),
        }
        oom_before = self._oom_kills()
        try:
            pending = await self._channel.start(header, stdin)
            answer, body = await self._or_cancel(pending.number, pending.answer)
        except ChannelClosedError as error:
            raise self._dead() from error
        return _result(answer, body, oom=self._oom_kills() > oom_before)

    async def _or_cancel(
        self, number: int, answer: "asyncio.Future[tuple[frames.Header, bytes]]"
    ) -> tuple[frames.Header, bytes]:
        """Wait for a command; when the caller is cancelled, the command is killed before the cancellation goes on."""
        assert self._channel is not None
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            with contextlib.suppress(ChannelClosedError, TimeoutError):
                async with asyncio.timeout(10.0):
                    await self._channel.request({"op": "cancel", "target": number})
                    await asyncio.shield(answer)
            raise

    async def kill_all(self) -> int:
        """Kill every process but the supervisor."""
        answer, _ = await self._request({"op": "kill_all"})
        return int(str(answer["killed"]))

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file atomically."""
        await uploads.write(self._request, self._path(path), data, mode)

    async def read(self, path: str, *, limit_bytes: int = 16 * MIB) -> bytes:
        """Read a regular file."""
        _, data = await self._request({"op": "read", "path": self._path(path), "limit_bytes": limit_bytes})
        return data

    async def upload(self, source: str, target: str) -> None:
        """Copy a host folder or file into the sandbox."""
        await uploads.upload(self._request, Path(source), self._path(target))

    def _path(self, path: str) -> str:
        return os.path.normpath(os.path.join(self._spec.workdir, path))  # noqa: PTH118 - a path inside, not ours

    # --- end

    async def close(self) -> None:
        """End it. Once begun, cancelling the caller does not stop it half-way."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._launched is not None:
            await self._launched.end()
        if self._channel is not None:
            await self._channel.close()
        elif self._launched is not None:
            self._launched.control.close()
        if self._slot is not None:
            await asyncio.to_thread(cgroup.remove, self._cgroups)
            self._slot.release()
        self._backend.forget(self)


class LocalBackend:
    """Makes bubblewrap sandboxes."""

    def __init__(self, *, bwrap_path: str | None = None, use_cgroups: bool = True) -> None:
        self.host = host.look(bwrap_path)
        self.cgroups = cgroup.find() if self.host.root and use_cgroups else cgroup.Cgroups(version=0)
        self._open: set[LocalSandbox] = set()
        self._ready = False

    @property
    def name(self) -> str:
        """Name of the kind."""
        return "local"

    async def check(self) -> dict[str, str]:
        """Prove by a sandbox of its own that isolation works here."""
        found = await self._create(SandboxSpec(sandbox_id="check"))
        try:
            return await probe.prove(found, self.host, self.cgroups)
        finally:
            await found.close()

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox."""
        return await self._create(spec)

    async def _create(self, spec: SandboxSpec) -> LocalSandbox:
        self._prepare()
        _refuse_unusable(spec, root=self.host.root)
        sandbox = LocalSandbox(self, spec, spec.sandbox_id)
        self._open.add(sandbox)
        await sandbox.start()
        return sandbox

    def _prepare(self) -> None:
        if self._ready:
            return
        if self.host.bwrap is None:
            raise faults.no_bwrap()
        if self.host.machine not in seccomp.ARCHITECTURES:
            raise faults.unknown_machine(self.host.machine)
        if self.host.root:
            (Path(host.RUNTIME_DIR) / "stage").mkdir(parents=True, exist_ok=True)
            for slot in slots.stale(Path(host.RUNTIME_DIR) / "slots"):
                cgroup.remove(self.cgroups.folders(str(slot.number)))
                slot.release()
        self._ready = True

    def rlimits(self, spec: SandboxSpec) -> dict[str, int]:
        """Limits of each command: resource number → value."""
        found = {resource.RLIMIT_CORE: 0}
        if spec.limits.file_bytes is not None:
            found[resource.RLIMIT_FSIZE] = spec.limits.file_bytes
        if spec.limits.memory_bytes is not None and self.cgroups.memory is None:
            found[resource.RLIMIT_DATA] = spec.limits.memory_bytes
        if spec.limits.processes is not None:
            found[resource.RLIMIT_NPROC] = spec.limits.processes
        return {str(kind): value for kind, value in found.items()}

    def forget(self, sandbox: LocalSandbox) -> None:
        """Called by a sandbox that is closed."""
        self._open.discard(sandbox)

    async def close(self) -> None:
        """Close every sandbox that is still open."""
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._open)))


def _inside(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(folder)


def _refuse_unusable(spec: SandboxSpec, *, root: bool) -> None:
    """Say what is wrong with a spec before anything is started."""
    for mount in spec.mounts:
        if not Path(mount.source).exists():
            raise faults.bad_spec("no_such_mount", f"there is no {mount.source} to mount at {mount.target}")
    if spec.proxy_socket is None:
        return
    try:
        found = Path(spec.proxy_socket).stat()
    except OSError as error:
        raise faults.bad_spec("no_proxy_socket", f"no proxy socket at {spec.proxy_socket}: {error}") from error
    if not stat.S_ISSOCK(found.st_mode):
        raise faults.bad_spec("no_proxy_socket", f"{spec.proxy_socket} is not a socket")
    if root and not found.st_mode & stat.S_IWOTH:
        raise faults.bad_spec(
            "proxy_socket_closed",
            f"sandboxes of root have uids of their own, and {spec.proxy_socket} lets only its owner connect: "
            "chmod 666 it (a 0700 folder around it keeps other users of the host out)",
        )


def _result(answer: frames.Header, body: bytes, *, oom: bool) -> ExecResult:
    if "error" in answer:
        raise faults.refused(answer, Phase.RUN, blame=Blame.AGENT)
    kept = int(str(answer["stdout_kept"]))
    named = ("exit_code", "signal", "timed_out", "killed_by", "escalated", "stdout_bytes", "stderr_bytes")
    fields = {name: answer[name] for name in named if name in answer}
    return ExecResult(
        **fields,  # type: ignore[arg-type]
        duration_s=float(str(answer.get("duration_s", 0.0))),
        lingering=int(str(answer.get("lingering", 0))),
        stdout=body[:kept],
        stderr=body[kept:],
    )
