"""Proof that a sandbox of this host holds: one is started and looked at from inside and outside."""

from pathlib import Path
from typing import Protocol

from env_service.backends import faults
from env_service.backends.host import Host
from env_service.limits import Cgroups
from orchard_proxy.schema.sandbox import Sandbox


class Watched(Sandbox, Protocol):
    """A sandbox whose supervisor's pid on the host is known."""

    @property
    def pid(self) -> int:
        """The pid."""
        ...


async def prove(found: Watched, host: Host, cgroups: Cgroups) -> dict[str, str]:
    """Check the sandbox from inside; say what is enforced, and how. Raises SandboxError when it does not hold."""
    seen = await found.exec("cat /proc/self/status", timeout_s=30)
    status = dict(line.split(":\t", 1) for line in seen.stdout.decode().splitlines() if ":\t" in line)
    wanted = {"NoNewPrivs": "1", "Seccomp": "2", "CapEff": "0" * 16, "CapBnd": "0" * 16}
    for key, value in wanted.items():
        if status.get(key) != value:
            raise faults.not_isolated(f"in a sandbox {key} is {status.get(key)}, not {value}")
    interfaces = [line.split(b":")[0].strip() for line in (await found.read("/proc/net/dev")).splitlines()[2:]]
    if interfaces != [b"lo"]:
        raise faults.not_isolated(f"in a sandbox there are network interfaces: {interfaces}")
    if (await found.exec("echo > /usr/orchard-check", timeout_s=30)).ok:
        raise faults.not_isolated("a sandbox can write to /usr")
    outside = _uid_outside(found.pid)
    if outside == 0:
        raise faults.not_isolated("a sandbox's uid is root on the host")
    return {"uid": f"{outside} on the host", **_enforced(host, cgroups)}


def _uid_outside(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Uid:"))


def _processes(host: Host, cgroups: Cgroups) -> str:
    if cgroups.pids:
        return f"cgroup v{cgroups.version} and rlimit"
    return "rlimit" if host.counts_processes else "not limited: this needs root, or Linux 5.14"


def _enforced(host: Host, cgroups: Cgroups) -> dict[str, str]:
    return {
        "namespaces": "user, pid, mount, net, ipc, uts, cgroup; none inside",
        "privileges": "no capabilities, no new privileges",
        "seccomp": f"filter for {host.machine}",
        "network": "none but the proxy socket",
        "memory": f"cgroup v{cgroups.version}, the whole sandbox" if cgroups.memory else "rlimit, each process",
        "processes": _processes(host, cgroups),
        "disk": "workdir, home, /tmp in memory, each with a size",
        "bubblewrap": str(host.bwrap),
        "root": "yes: a uid for each sandbox" if host.root else "no",
        "kernel": Path("/proc/sys/kernel/osrelease").read_text().strip(),
    }
