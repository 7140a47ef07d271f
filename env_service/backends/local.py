"""Sandboxes on this machine, by bubblewrap. No daemon; root is not needed, but makes more possible.

What is enforced is in `LocalBackend.check`. What cannot be enforced is an error: there is no way from here to a bare
subprocess.
"""

import asyncio
import os
import resource
import stat
from pathlib import Path, PurePosixPath

from env_service import limits as cgroup
from env_service.backends import faults, host, probe, slots
from env_service.backends.sandbox import LocalSandbox
from orchard_proxy.schema.sandbox import MIB, Limits, Sandbox, SandboxSpec

_LEAST_MEMORY_BYTES = 48 * MIB
_MOST_OUTPUT_BYTES = 48 * MIB
"""Both outputs of a command come in one message."""
_OWN_PROCESSES = 8
"""Supervisor and shims have the sandbox's uid and count against the commands' limit."""
_NOT_WRITABLE = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/dev", "/run/orchard")


class LocalBackend:
    """Makes bubblewrap sandboxes."""

    def __init__(self, *, bwrap_path: str | None = None, use_cgroups: bool = True) -> None:
        self.host = host.look(bwrap_path)
        self.cgroups = cgroup.find() if self.host.root and use_cgroups else cgroup.Cgroups(version=0)
        self._open: set[LocalSandbox] = set()
        self._preparing = asyncio.Lock()
        self._ready = False
        # More at once would only make each of them slower, up to its time-out.
        self._starting = asyncio.Semaphore(4 + 2 * (os.cpu_count() or 1))
        # Apart from other runs on this machine, which look from other numbers on.
        self._next_slot = os.getpid() * 101

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
        async with self._preparing:
            if not self._ready:
                try:
                    await asyncio.to_thread(self._prepare)
                except OSError as error:
                    raise faults.create_failed(str(error)) from error
                self._ready = True
        _refuse_unusable(spec, root=self.host.root)
        sandbox = LocalSandbox(self, spec)
        async with self._starting:
            self._open.add(sandbox)
            await sandbox.start()
        return sandbox

    def _prepare(self) -> None:
        """Refuse what cannot work, and clear away what killed runs left."""
        faults.refuse_host(self.host)
        self.host = host.with_agent_readable(self.host)
        for slot in slots.stale(host.SLOTS) if self.host.root else []:
            cgroup.remove(self.cgroups.folders(str(slot.number)))
            slot.release()

    def slot(self) -> slots.Slot | None:
        """Take a uid; one given back lately comes last."""
        if not self.host.root:
            return None
        slot = slots.acquire(host.SLOTS, self._next_slot)
        self._next_slot = slot.number + 1
        return slot

    def rlimits(self, spec: SandboxSpec) -> dict[str, int]:
        """Limits of each command: resource number → value."""
        found = {resource.RLIMIT_CORE: 0}
        if spec.limits.file_bytes is not None:
            found[resource.RLIMIT_FSIZE] = spec.limits.file_bytes
        if spec.limits.memory_bytes is not None and self.cgroups.memory is None:
            # Not RLIMIT_AS: runtimes like V8 reserve far more addresses than they ever use.
            found[resource.RLIMIT_DATA] = spec.limits.memory_bytes
        if spec.limits.processes is not None and self.host.counts_processes:
            found[resource.RLIMIT_NPROC] = spec.limits.processes + _OWN_PROCESSES
        return {str(kind): value for kind, value in found.items()}

    def forget(self, sandbox: LocalSandbox) -> None:
        """Take note that a sandbox is closed."""
        self._open.discard(sandbox)

    async def close(self) -> None:
        """Close every sandbox that is still open."""
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._open)))


def _refuse_unusable(spec: SandboxSpec, *, root: bool) -> None:
    """Say what is wrong with a spec before anything is started."""
    for path in (spec.workdir, spec.home, *spec.scratch, *(mount.target for mount in spec.mounts)):
        if not path.startswith("/") or os.path.normpath(path) != path or path == "/":
            raise faults.bad_spec("bad_path", f"{path!r} is not a plain absolute path below /")
    for path in (spec.workdir, spec.home, *spec.scratch):
        if any(PurePosixPath(path).is_relative_to(folder) for folder in _NOT_WRITABLE):
            raise faults.bad_spec("bad_path", f"{path} is in a system folder, and those are read-only")
    for mount in spec.mounts:
        if not Path(mount.source).exists():
            raise faults.bad_spec("no_such_mount", f"there is no {mount.source} to mount at {mount.target}")
    if spec.rootfs is not None and not Path(spec.rootfs).is_dir():
        raise faults.bad_spec("no_such_rootfs", f"there is no folder {spec.rootfs} to use as the root")
    _refuse_limits(spec.limits)
    if spec.proxy_socket is not None:
        _refuse_socket(spec.proxy_socket, root=root)


def _refuse_limits(limits: Limits) -> None:
    if limits.memory_bytes is not None and limits.memory_bytes < _LEAST_MEMORY_BYTES:
        raise faults.bad_spec("memory_too_small", f"a sandbox needs {_LEAST_MEMORY_BYTES} bytes of memory")
    if limits.output_bytes > _MOST_OUTPUT_BYTES:
        raise faults.bad_spec("output_too_large", f"at most {_MOST_OUTPUT_BYTES} bytes of an output are kept")


def _refuse_socket(path: str, *, root: bool) -> None:
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        raise faults.bad_spec("no_proxy_socket", f"no proxy socket at {path}: {error}") from error
    if not stat.S_ISSOCK(mode):
        raise faults.bad_spec("no_proxy_socket", f"{path} is not a socket")
    if root and not mode & stat.S_IWOTH:
        raise faults.bad_spec(
            "proxy_socket_closed",
            f"sandboxes of root have uids of their own, and {path} lets only its owner connect: "
            "chmod 666 it (a 0700 folder around it keeps other users of the host out)",
        )
