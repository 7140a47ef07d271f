"""Memory and process limits by cgroup: version 1 or 2 where root may write there, else none (then rlimits hold)."""

import contextlib
import os
import signal
import time
from pathlib import Path

import msgspec

from orchard_proxy.schema.sandbox import Limits

CGROUP_ROOT = Path("/sys/fs/cgroup")
_GROUP = "orchard"
RESERVED_PROCESSES = 64
"""Beyond the commands' own limit: the supervisor and the shims must always be able to start."""


class Cgroups(msgspec.Struct, frozen=True, kw_only=True):
    """The hierarchies in which a sandbox can be limited."""

    version: int
    """0: none."""
    memory: Path | None = None
    pids: Path | None = None

    def folders(self, name: str) -> list[Path]:
        """Name the cgroup folders of one sandbox."""
        return sorted({parent / name for parent in (self.memory, self.pids) if parent is not None})


def find(root: Path = CGROUP_ROOT) -> Cgroups:
    """Find and prepare the hierarchies."""
    if (root / "cgroup.controllers").exists():
        return _version_2(root)
    memory, pids = _prepared(root / "memory"), _prepared(root / "pids")
    return Cgroups(version=1 if memory or pids else 0, memory=memory, pids=pids)


def _prepared(hierarchy: Path) -> Path | None:
    if not (hierarchy / "cgroup.procs").exists():
        return None
    try:
        (hierarchy / _GROUP).mkdir(exist_ok=True)
    except OSError:
        return None
    return hierarchy / _GROUP


def _version_2(root: Path) -> Cgroups:
    group = root / _GROUP
    try:
        group.mkdir(exist_ok=True)
        for folder in (root, group):
            (folder / "cgroup.subtree_control").write_text("+memory +pids")
        enabled = (group / "cgroup.subtree_control").read_text().split()
    except OSError:  # read-only, or the root has processes of its own (a container)
        return Cgroups(version=0)
    memory = group if "memory" in enabled else None
    pids = group if "pids" in enabled else None
    return Cgroups(version=2 if memory or pids else 0, memory=memory, pids=pids)


def make(cgroups: Cgroups, name: str, limits: Limits) -> list[Path]:
    """Make the cgroups of one sandbox and set its limits."""
    folders = cgroups.folders(name)
    for folder in folders:
        folder.mkdir(exist_ok=True)
    if cgroups.memory is not None and limits.memory_bytes is not None:
        key = "memory.max" if cgroups.version == 2 else "memory.limit_in_bytes"
        (cgroups.memory / name / key).write_text(str(limits.memory_bytes))
        _no_swap(cgroups, name, limits.memory_bytes)
    if cgroups.pids is not None and limits.processes is not None:
        (cgroups.pids / name / "pids.max").write_text(str(limits.processes + RESERVED_PROCESSES))
    return folders


def _no_swap(cgroups: Cgroups, name: str, memory_bytes: int) -> None:
    """Keep the limit a limit: swap would only make it slow. Where swap is not counted there is no such file."""
    assert cgroups.memory is not None
    key, value = ("memory.swap.max", 0) if cgroups.version == 2 else ("memory.memsw.limit_in_bytes", memory_bytes)
    path = cgroups.memory / name / key
    if path.exists():
        with contextlib.suppress(OSError):
            path.write_text(str(value))


def oom_kills(cgroups: Cgroups, name: str) -> int:
    """Count the processes that the kernel killed for want of memory."""
    if cgroups.memory is None:
        return 0
    path = cgroups.memory / name / ("memory.events" if cgroups.version == 2 else "memory.oom_control")
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def remove(folders: list[Path], *, limit_s: float = 5.0) -> None:
    """Kill what is left in the cgroups and remove them. Raises OSError when the kernel will not let go."""
    until = time.monotonic() + limit_s
    for folder in folders:
        while folder.exists():
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            try:
                folder.rmdir()
            except OSError:  # busy until the last process is gone
                if time.monotonic() > until:
                    raise
                time.sleep(0.005)
