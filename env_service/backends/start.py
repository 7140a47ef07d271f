"""From a spec to a running supervisor: the layout of the sandbox, its command line, its launch."""

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from env_service import seccomp
from env_service.backends import bwrap, idmap, interpreter
from env_service.backends.host import Host
from env_service.backends.launcher import Staging
from env_service.backends.process import Launched, memory_file
from orchard_proxy.schema.sandbox import Mount, SandboxSpec

_START = "import sys; sys.path.insert(0, {root!r}); from env_service.agent.supervisor import main; main({fd})"


def launch(facts: Host, spec: SandboxSpec, uid: int | None, cgroups: Sequence[Path]) -> Launched:
    """Start a sandbox. With a uid we are root, and the launcher goes first."""
    with contextlib.ExitStack() as ours_to_close:
        control, theirs = socket.socketpair()
        ours_to_close.callback(theirs.close)
        info_read, info_write = os.pipe()
        ours_to_close.callback(os.close, info_write)
        files = {target: memory_file("orchard", text.encode()) for target, text in _made_up(spec).items()}
        filter_fd = memory_file("orchard-seccomp", seccomp.program(facts.machine))
        for fd in (*files.values(), filter_fd):
            ours_to_close.callback(os.close, fd)
        fds = (theirs.fileno(), info_write, filter_fd, *files.values())
        words = _Plan(facts, spec, uid, cgroups).words(files, *fds[:3])
        return Launched.start(words, control, info_read, fds)


def _made_up(spec: SandboxSpec) -> dict[str, str]:
    if spec.rootfs is not None:  # it has an /etc of its own
        return {}
    return {**{f"/etc/{name}": text for name, text in bwrap.MADE_UP.items()}, "/etc/passwd": bwrap.passwd(spec.home)}


class _Plan:
    """The words of one launch."""

    def __init__(self, facts: Host, spec: SandboxSpec, uid: int | None, cgroups: Sequence[Path]) -> None:
        self._facts = facts
        self._spec = spec
        self._uid = uid
        self._staging = Staging([facts.interpreter, "-I", "-S", idmap.__file__])
        self._staging.join([str(folder) for folder in cgroups])
        choose = interpreter.on_host_folders if spec.rootfs is None else interpreter.on_rootfs
        self._python = choose(facts.interpreter, facts.prefix)

    def words(self, files: Mapping[str, int], control_fd: int, info_fd: int, filter_fd: int) -> list[str]:
        binds = self._binds()
        root = None
        if self._uid is not None:
            root = self._staged_root(binds)
            binds = [Mount(source=self._staging.bind(bind.source), target=bind.target) for bind in binds]
        layout = bwrap.Layout(
            system=self._facts.system,
            etc=self._facts.etc,
            binds=binds,
            root=root,
            data=files,
            seccomp_fd=filter_fd,
            info_fd=info_fd,
            scratch_bytes=bwrap.scratch(self._spec),
        )
        code = _START.format(root=bwrap.AGENT_ROOT, fd=control_fd)
        command = [*self._python.argv, "-I", "-S", "-B", "-c", code]
        words = [self._bwrap(), *bwrap.argv(self._spec, layout, command)]
        return words if self._uid is None else self._staging.argv(self._uid, words)

    def _binds(self) -> list[Mount]:
        binds = [Mount(source=self._facts.agent, target=f"{bwrap.AGENT_ROOT}/env_service/agent"), *self._python.binds]
        if self._spec.proxy_socket is not None:
            binds.append(Mount(source=self._spec.proxy_socket, target=bwrap.PROXY_SOCKET))
        return [*binds, *self._spec.mounts]

    def _staged_root(self, binds: Sequence[Mount]) -> str | None:
        if self._spec.rootfs is None:
            return None
        whole = [bind.target for bind in binds if Path(bind.source).is_dir()]
        single = [bind.target for bind in binds if not Path(bind.source).is_dir()]
        folders = ["/proc", "/dev", *(path for path in bwrap.scratch(self._spec) if path != bwrap.SHM), *whole]
        return self._staging.root(self._spec.rootfs, bwrap.root_bytes(self._spec), folders, single)

    def _bwrap(self) -> str:
        """Name bubblewrap as the sandbox's uid can reach it; PyPI's has its library beside its package."""
        assert self._facts.bwrap is not None
        path = Path(self._facts.bwrap)
        if self._uid is None:
            return str(path)
        package = path.parent.parent
        libraries = package.with_name(package.name + ".libs")
        if not libraries.is_dir():
            return self._staging.bind(str(path))
        self._staging.bind_at(str(libraries), libraries.name)
        return f"{self._staging.bind_at(str(package), package.name)}/{path.relative_to(package)}"
