"""One running bubblewrap sandbox, for the one who uses it."""

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from env_service import limits as cgroup
from env_service.agent import frames
from env_service.backends import bwrap, faults, slots, start, uploads
from env_service.backends.channel import Channel, ChannelClosedError
from env_service.backends.host import Host
from env_service.backends.process import Launched
from orchard_proxy.schema.enums import Phase
from orchard_proxy.schema.sandbox import MIB, ExecResult, SandboxSpec

_START_S = 60.0
_CANCEL_S = 15.0
_LONGEST_EXEC_S = 24 * 3600.0
"""What a command gets when no limit is named."""
_MOST_STDIN_BYTES = 100 * MIB
_MOST_READ_BYTES = 100 * MIB
_MOST_ARGV_BYTES = 2 * MIB
_RESULT_FIELDS = ("exit_code", "signal", "timed_out", "killed_by", "escalated", "stdout_bytes", "stderr_bytes")


class Keeper(Protocol):
    """What a sandbox needs of its back end."""

    host: Host
    cgroups: cgroup.Cgroups

    def slot(self) -> slots.Slot | None:
        """Take a uid; None: we are not root."""
        ...

    def rlimits(self, spec: SandboxSpec) -> dict[str, int]:
        """Limits of each command."""
        ...

    def forget(self, sandbox: "LocalSandbox") -> None:
        """Take note that it is closed."""
        ...


class LocalSandbox:
    """One bubblewrap sandbox and its supervisor."""

    def __init__(self, keeper: Keeper, spec: SandboxSpec) -> None:
        self._keeper = keeper
        self._spec = spec
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
        if self._launched is None or self._launched.pid is None:
            raise faults.closed(self._spec.sandbox_id)
        return self._launched.pid

    # --- start

    async def start(self) -> None:
        """Start it; on failure nothing is left behind."""
        try:
            await self._start()
        except (OSError, slots.NoSlotError, ChannelClosedError) as error:
            said = await self._launched.complaint() if self._launched else ""
            await self.close()
            raise faults.create_failed(said or str(error) or repr(error)) from error
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        self._slot = self._keeper.slot()
        if self._slot is not None:
            name = str(self._slot.number)
            if self._slot.stale:
                await asyncio.to_thread(cgroup.remove, self._keeper.cgroups.folders(name))
            self._cgroups = cgroup.make(self._keeper.cgroups, name, self._spec.limits)
        uid = None if self._slot is None else self._slot.uid
        self._launched = start.launch(self._keeper.host, self._spec, uid, self._cgroups)
        self._channel = await Channel.over(self._launched.control)
        async with asyncio.timeout(_START_S):
            await self._channel.request({"op": "ping"})
            self._launched.learn_pid()
            if self._spec.proxy_socket is not None:
                ask: frames.Header = {"op": "forward", "port": self._spec.proxy_port, "target": bwrap.PROXY_SOCKET}
                await self._request(ask, phase=Phase.CREATE)

    # --- requests

    def _live(self) -> Channel:
        if self._channel is None or self._closing is not None:
            raise faults.closed(self._spec.sandbox_id)
        return self._channel

    async def _request(
        self, header: frames.Header, body: bytes = b"", *, phase: Phase = Phase.RUN
    ) -> tuple[frames.Header, bytes]:
        try:
            answer, data = await self._live().request(header, body)
        except ChannelClosedError as error:
            raise self._dead() from error
        if "error" in answer:
            raise faults.refused(answer, phase)
        return answer, data

    def _oom_kills(self) -> int:
        return cgroup.oom_kills(self._keeper.cgroups, str(self._slot.number)) if self._slot is not None else 0

    def _dead(self) -> Exception:
        if self._closing is not None:
            return faults.closed(self._spec.sandbox_id)
        said = self._launched.said if self._launched is not None else ""
        return faults.dead(self._spec.sandbox_id, said, out_of_memory=self._oom_kills() > 0)

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
        words = ["/bin/sh", "-c", argv] if isinstance(argv, str) else list(argv)
        _refuse_large(words, stdin)
        header: frames.Header = {
            "op": "exec",
            "argv": words,
            "env": plain_env({**self._spec.env, **(env or {})}, self._spec.home),
            "cwd": self._path(cwd or self._spec.workdir),
            "timeout_s": _LONGEST_EXEC_S if timeout_s is None else timeout_s,
            "grace_s": grace_s,
            "output_bytes": self._spec.limits.output_bytes,
            "rlimits": self._keeper.rlimits(self._spec),
        }
        oom_before = self._oom_kills()
        try:
            answer, body = await self._or_cancel(self._live(), header, stdin)
        except ChannelClosedError as error:
            raise self._dead() from error
        if "error" in answer:
            raise faults.refused(answer, Phase.RUN)
        return _result(answer, body, oom=self._oom_kills() > oom_before)

    @staticmethod
    async def _or_cancel(channel: Channel, header: frames.Header, stdin: bytes) -> tuple[frames.Header, bytes]:
        """Wait for a command; when the caller is cancelled, the command is killed before the cancellation goes on."""
        pending = channel.start(header, stdin)
        try:
            return await asyncio.shield(pending.answer)
        except asyncio.CancelledError:
            with contextlib.suppress(ChannelClosedError, TimeoutError):
                async with asyncio.timeout(_CANCEL_S):
                    await channel.request({"op": "cancel", "target": pending.number})
                    await asyncio.shield(pending.answer)
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
        most = min(limit_bytes, _MOST_READ_BYTES)
        _, data = await self._request({"op": "read", "path": self._path(path), "limit_bytes": most})
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
        try:
            if self._slot is not None:
                await asyncio.to_thread(cgroup.remove, self._cgroups)
                self._slot.release()
        finally:
            self._keeper.forget(self)


def plain_env(extra: Mapping[str, str], home: str) -> dict[str, str]:
    """Give the environment of a command: nothing of the host's."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": home,
        "USER": bwrap.INSIDE_NAME,
        "LOGNAME": bwrap.INSIDE_NAME,
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp",  # noqa: S108 - the sandbox's own
        **extra,
    }


def _refuse_large(words: Sequence[str], stdin: bytes) -> None:
    if sum(map(len, words)) > _MOST_ARGV_BYTES:
        raise faults.too_large("command_too_large", f"a command of more than {_MOST_ARGV_BYTES} bytes; write a file")
    if len(stdin) > _MOST_STDIN_BYTES:
        raise faults.too_large("stdin_too_large", f"stdin of more than {_MOST_STDIN_BYTES} bytes; write a file")


def _result(answer: frames.Header, body: bytes, *, oom: bool) -> ExecResult:
    kept = int(str(answer["stdout_kept"]))
    fields = {name: answer[name] for name in _RESULT_FIELDS if name in answer}
    return ExecResult(
        **fields,  # type: ignore[arg-type]
        oom=oom,
        duration_s=float(str(answer.get("duration_s", 0.0))),
        lingering=int(str(answer.get("lingering", 0))),
        stdout=body[:kept],
        stderr=body[kept:],
    )
