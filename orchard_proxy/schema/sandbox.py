"""Sandboxes as their users see them: what is asked for, what an exec gave, and the doors of a back end.

The runner knows sandboxes by these Protocols alone; `env_service` implements them. What a back end cannot do is a
`SandboxError` with a code, never a silent downgrade.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from orchard_proxy.schema.enums import Blame, Phase
from orchard_proxy.schema.records import Failure

MIB = 1024 * 1024


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """A host path that is visible inside, read-only."""

    source: str
    target: str


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Ceilings of one sandbox. None means: no limit of ours."""

    memory_bytes: int | None = 2048 * MIB
    """All processes together where the back end can count them, else each process."""
    processes: int | None = 512
    output_bytes: int = 1 * MIB
    """Kept of stdout and of stderr each: head and tail; the rest is counted, not kept."""
    file_bytes: int | None = 1024 * MIB
    """Largest single file."""


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One isolated machine. Writable are workdir, home, /tmp and `scratch`; with a rootfs, all of it."""

    sandbox_id: str
    workdir: str = "/workspace"
    home: str = "/home/agent"
    scratch: list[str] = []
    """Further folders that are writable and empty at the start, such as `/tests` and `/logs` of a Harbor task."""
    env: dict[str, str] = {}
    mounts: list[Mount] = []
    rootfs: str | None = None
    """Folder used as the root, read-only under a writable overlay. None: the host's system folders, read-only."""
    proxy_socket: str | None = None
    """Unix socket of the data plane; inside it is `http://127.0.0.1:proxy_port`. None: no network at all."""
    proxy_port: int = 8080
    limits: Limits = Limits()


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one command ended. `timed_out` is a field of its own: an exit code 124 is just an exit code."""

    exit_code: int | None
    """None when a signal ended it, or the sandbox died."""
    signal: int | None = None
    timed_out: bool = False
    killed_by: Literal["timeout", "caller"] | None = None
    escalated: bool = False
    """SIGTERM was not enough."""
    duration_s: float
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_bytes: int = 0
    """All that was written; more than len(stdout) when the middle was left out."""
    stderr_bytes: int = 0
    oom: bool = False
    """The kernel killed a process of the sandbox for want of memory meanwhile; False also where that is not counted."""
    lingering: int = 0
    """Processes that the command left running."""

    @property
    def ok(self) -> bool:
        """Whether it exited with 0 in time."""
        return self.exit_code == 0 and not self.timed_out


class SandboxError(Exception):
    """A sandbox could not do what was asked. `failure` goes into the rollout's row as it is."""

    def __init__(self, code: str, message: str, *, blame: Blame = Blame.INFRA, phase: Phase, retryable: bool) -> None:
        super().__init__(message)
        self.failure = Failure(code=code, blame=blame, phase=phase, retryable=retryable, message=message)


class Sandbox(Protocol):
    """One running sandbox."""

    @property
    def spec(self) -> SandboxSpec:
        """What was asked for."""
        ...

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
        """Run a command; a str is run by `/bin/sh -c`, a list is argv as it is.

        After `timeout_s`, counted from the start of the process, the whole process tree is dead (SIGTERM, after
        `grace_s` SIGKILL) and the sandbox lives on. Cancelling the caller kills the tree too.
        """
        ...

    async def kill_all(self) -> int:
        """Kill every process of the sandbox but its own supervisor; return how many there were."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file, atomically, making its folders."""
        ...

    async def read(self, path: str, *, limit_bytes: int = 16 * MIB) -> bytes:
        """Read a file; a larger one is a SandboxError `file_too_large`, none is `no_such_file`."""
        ...

    async def upload(self, source: str, target: str) -> None:
        """Copy a host folder or file into the sandbox, modes kept."""
        ...

    async def close(self) -> None:
        """Kill everything and remove what the sandbox wrote. Safe to call twice."""
        ...


class SandboxBackend(Protocol):
    """Makes sandboxes."""

    @property
    def name(self) -> str:
        """Name of the kind: `local`, later `kubernetes`."""
        ...

    async def check(self) -> dict[str, str]:
        """Prove that isolation works here; return what is enforced and how, e.g. {"memory": "cgroup v1"}.

        Raises SandboxError that says what is missing.
        """
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox. Raises SandboxError (phase create)."""
        ...

    async def close(self) -> None:
        """Close every sandbox that is still open."""
        ...
