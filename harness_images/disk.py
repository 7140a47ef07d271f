"""The installs on the disk: which are whole, who may build one, and what a sandbox must show of one.

An install counts only with its marker, which is renamed into place last and says how many files and bytes there are.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from orchard_proxy.schema.sandbox import Mount

_log = logging.getLogger(__name__)

MARKER = "orchard-install.json"
LOCK_POLL_S = 0.2


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """A whole install."""

    folder: str
    """Empty when the manifest installs nothing."""
    python_prefix: str = ""
    """Of the interpreter that the virtual environment links to; empty without one."""

    def mounts(self) -> list[Mount]:
        """Return what a sandbox must show, each at its own path."""
        paths = [self.folder, self.python_prefix, os.path.realpath(self.python_prefix) if self.python_prefix else ""]
        wanted = [path for path in dict.fromkeys(paths) if path and path != "/usr"]  # /usr is the sandbox's own
        return [Mount(source=path, target=path) for path in wanted]


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What the marker says."""

    files: int
    bytes: int
    python_prefix: str


def cache_dir() -> Path:
    """Return the folder of harness installs: in $ORCHARD_CACHE, else /var/cache/orchard for root, else XDG's."""
    if named := os.environ.get("ORCHARD_CACHE"):
        return Path(named).absolute() / "harness"
    if os.geteuid() == 0:
        return Path("/var/cache/orchard/harness")  # root's home is 0700: a sandbox user could not read a cache there
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orchard" / "harness"


def whole(target: Path) -> Installed | None:
    """Return the install if nothing of it is missing."""
    try:
        marker = msgspec.json.decode((target / MARKER).read_bytes(), type=Marker)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError:
        _log.warning("%s has a broken marker and is installed again", target)
        return None
    if (marker.files, marker.bytes) != measure(target) or not _python_runs(target, marker):
        _log.warning("%s is damaged and is installed again", target)
        return None
    return Installed(folder=str(target), python_prefix=marker.python_prefix)


def _python_runs(target: Path, marker: Marker) -> bool:
    """Whether the interpreter behind the virtual environment is still there."""
    return not marker.python_prefix or os.access(target / "bin" / "python", os.X_OK)


def publish(target: Path, *, python_prefix: str) -> Installed:
    """Write the marker: from now on the install counts."""
    files, size = measure(target)
    draft = target / f"{MARKER}.part"
    draft.write_bytes(msgspec.json.encode(Marker(files=files, bytes=size, python_prefix=python_prefix)))
    draft.chmod(0o644)
    draft.replace(target / MARKER)
    return Installed(folder=str(target), python_prefix=python_prefix)


def measure(target: Path) -> tuple[int, int]:
    """Count files and bytes, but for bytecode, which anyone who runs the harness may add, and our marker."""
    files = size = 0
    folders = [str(target)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders += [] if entry.name == "__pycache__" else [entry.path]
                elif not entry.name.startswith(MARKER):
                    files += 1
                    size += entry.stat(follow_symlinks=False).st_size
    return files, size


def empty(target: Path) -> None:
    """Make an empty folder where an install will be."""
    (target / MARKER).unlink(missing_ok=True)  # first: a half removed install must not count
    if target.exists():
        shutil.rmtree(target)
    target.mkdir()
    target.chmod(0o755)


def make_public(folder: Path) -> None:
    """Make a folder and its missing parents, readable for all: a sandbox runs as another user."""
    missing = [path for path in [folder, *folder.parents] if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        path.chmod(0o755)


@contextlib.asynccontextmanager
async def locked(target: Path) -> AsyncIterator[int]:
    """Hold the lock of an install; give its descriptor, so that a child can hold it too."""
    with target.with_name(f"{target.name}.lock").open("wb") as lock:
        waited = False
        while not _try_lock(lock.fileno()):
            if not waited:
                _log.info("another process is installing %s; waiting for it", target)
            waited = True
            await asyncio.sleep(LOCK_POLL_S)
        yield lock.fileno()


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
