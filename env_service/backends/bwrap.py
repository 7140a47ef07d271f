"""The bubblewrap command line of a sandbox. Pure: what is wanted in, argv out.

What each part is for: own user, pid, mount, net, ipc, uts and cgroup namespaces; no user namespaces inside; no
capability; no new privileges (bubblewrap always sets that); a system call filter; nothing inherited from the
environment; no terminal to type into; dead when the one who started it is. The root is read-only.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

import msgspec

from orchard_proxy.schema.sandbox import MIB, Mount, SandboxSpec

INSIDE_ID = 1000
INSIDE_NAME = "agent"
OWN = "/run/orchard"
"""Inside: the agent's code, the proxy socket, and what else is ours."""
PROXY_SOCKET = f"{OWN}/proxy.sock"
AGENT_ROOT = f"{OWN}/lib"
SHM = "/dev/shm"  # noqa: S108 - the sandbox's own
HOST_ROOT = f"{OWN}/host"
"""With a rootfs: where the host's C library and, if it is in /usr, its Python are, for the supervisor alone."""

_ETC = (
    "alternatives", "ca-certificates", "ca-certificates.conf", "crypto-policies", "debian_version", "gai.conf",
    "inputrc", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "locale.conf", "localtime", "magic",
    "mime.types", "os-release", "pki/tls/certs", "pki/ca-trust/extracted", "profile", "protocols", "services", "shells",
    "ssl/certs", "ssl/openssl.cnf", "terminfo", "timezone", "bash.bashrc",
)  # fmt: skip
"""What programs need of /etc. Everything else there is nobody's business."""

MADE_UP: dict[str, str] = {
    "hosts": "127.0.0.1 localhost\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "group": f"root:x:0:\n{INSIDE_NAME}:x:{INSIDE_ID}:\nnogroup:x:65534:\n",
}


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What the argv is made from, beside the spec: host facts and file descriptors."""

    system: Sequence[tuple[str, str]]
    """The host's system folders: (path, link target), the target empty where it is a real folder."""
    etc: Sequence[str]
    """Those of the /etc list that exist, as absolute paths."""
    binds: Sequence[Mount]
    """Read-only mounts: interpreter, agent, proxy socket, the caller's. The source is where bwrap can reach it."""
    root: str | None
    """A root made ready by a privileged launcher, to be bound writable; None with a rootfs: overlay by bwrap."""
    data: Mapping[str, int]
    """Made-up files: target → file descriptor with the content."""
    seccomp_fd: int
    info_fd: int
    scratch_bytes: Mapping[str, int]
    """Size of each writable folder: target → bytes."""


def etc_candidates() -> list[str]:
    """Name the files of the host's /etc that a sandbox may see."""
    return [f"/etc/{name}" for name in _ETC]


def passwd(home: str) -> str:
    """Make up /etc/passwd."""
    lines = [
        "root:x:0:0:root:/root:/bin/sh",
        f"{INSIDE_NAME}:x:{INSIDE_ID}:{INSIDE_ID}:{INSIDE_NAME}:{home}:/bin/sh",
        "nobody:x:65534:65534:nobody:/:/bin/false",
    ]
    return "\n".join(lines) + "\n"


def root_bytes(spec: SandboxSpec) -> int:
    """Size what may be written over a rootfs."""
    return (spec.limits.memory_bytes or 4096 * MIB) // 4


def scratch(spec: SandboxSpec) -> dict[str, int]:
    """Size the writable folders: they live in memory, together at most half of the limit, so full ones kill nobody."""
    memory = spec.limits.memory_bytes or 4096 * MIB
    few = {target: 2 / len(spec.scratch) for target in spec.scratch}
    shares = {SHM: 1, **few, "/tmp": 2, spec.home: 3, spec.workdir: 8}  # noqa: S108 - the sandbox's own
    return {target: int(memory * share / 32) for target, share in shares.items()}


def argv(spec: SandboxSpec, layout: Layout, command: Sequence[str]) -> list[str]:
    """Spell the arguments after `bwrap`."""
    words = ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", str(INSIDE_ID), "--gid", str(INSIDE_ID)]
    words += ["--cap-drop", "ALL", "--die-with-parent", "--new-session", "--clearenv", "--as-pid-1"]
    words += ["--hostname", "sandbox", "--seccomp", str(layout.seccomp_fd), "--info-fd", str(layout.info_fd)]
    words += _root(spec, layout)
    words += ["--proc", "/proc", "--dev", "/dev"]
    words += _mounts(layout)
    words += ["--remount-ro", "/dev"]
    if spec.rootfs is None:
        words += ["--remount-ro", "/"]
    return [*words, "--chdir", spec.workdir, "--", *command]


def _root(spec: SandboxSpec, layout: Layout) -> list[str]:
    if spec.rootfs is not None:
        if layout.root is not None:
            return ["--bind", layout.root, "/"]
        return ["--overlay-src", spec.rootfs, "--tmp-overlay", "/"]
    words = ["--perms", "0755", "--dir", "/etc", "--perms", "0755", "--dir", "/run", "--perms", "0755", "--dir", OWN]
    for path, target in layout.system:
        words += ["--symlink", target, path] if target else ["--ro-bind", path, path]
    for path in layout.etc:
        words += ["--ro-bind", path, path]
    for path, fd in layout.data.items():
        words += ["--perms", "0444", "--ro-bind-data", str(fd), path]
    return words


def _mounts(layout: Layout) -> list[str]:
    mounts = [(target, _scratch(target, size)) for target, size in layout.scratch_bytes.items()]
    mounts += [(bind.target, ["--ro-bind", bind.source, bind.target]) for bind in layout.binds]
    return [word for _, words in sorted(mounts, key=lambda mount: _depth(mount[0])) for word in words]


def _scratch(target: str, size_bytes: int) -> list[str]:
    mode = "1777" if target in {"/tmp", SHM} else "0755"  # noqa: S108
    return ["--perms", mode, "--size", str(size_bytes), "--tmpfs", target]


def _depth(path: str) -> int:
    """Mount the outer before the inner, or it would hide it."""
    return len(PurePosixPath(path).parts)
