"""Put a harness into the cache, once, in a place that can be bound read-only into a sandbox at the same path.

An install is `$ORCHARD_CACHE/harness/<name>-<version>-<hash>`: a virtual environment of its own with pinned packages,
and the files of the manifest's folder. The hash is of everything that decides the content. It is built where it stays,
since a virtual environment cannot be moved, and it counts only with its marker, which is renamed into place last and
says how many files and bytes there are.

Invariant: what `install` returns is whole. One process builds, under a lock that pip holds too: if we are killed, the
next installer waits until the orphaned pip has ended, and begins afresh.
"""

import asyncio
import contextlib
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from harness_images import disk, interpreters
from harness_images.disk import Installed, cache_dir
from harness_images.fields import Install, Manifest
from harness_images.interpreters import Interpreter
from orchard_proxy.schema.enums import Blame, Phase
from orchard_proxy.schema.launch import HarnessError

_log = logging.getLogger(__name__)

LAYOUT = 1
"""Goes up when installs of an older Orchard can no longer be used."""
EXCERPT_LINES = 3
OFFLINE = (
    "NewConnectionError",
    "Failed to establish",
    "name resolution",
    "Network is unreachable",
    "ConnectTimeout",
    "Max retries",
    "ProxyError",
)
"""What pip prints when it cannot reach an index."""
UNWANTED = (
    "PIP_TARGET",
    "PIP_PYTHON",
    "PIP_PREFIX",
    "PIP_USER",
    "PIP_REQUIRE_VIRTUALENV",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
)
"""Variables of the caller that would send packages elsewhere; its indexes and certificates stay."""


async def install(manifest: Manifest, source: Path) -> Installed:
    """Install a manifest whose folder is `source` (absolute), unless that has been done. Raises HarnessError."""
    target, interpreter = await _target(manifest, source)
    if target is None:
        return Installed(folder="")
    with _readable_errors(target):
        if found := await asyncio.to_thread(disk.whole, target):
            return found
        disk.make_public(target.parent)
        async with disk.locked(target) as lock:
            if found := await asyncio.to_thread(disk.whole, target):
                return found
            return await _build(manifest, source, target, interpreter, lock)


async def find(manifest: Manifest, source: Path) -> Installed | None:
    """Return the install, if there is a whole one. Raises HarnessError where there can be none."""
    target, _ = await _target(manifest, source)
    if target is None:
        return Installed(folder="")
    with _readable_errors(target):
        return await asyncio.to_thread(disk.whole, target)


async def _target(manifest: Manifest, source: Path) -> tuple[Path | None, Interpreter | None]:
    wants = manifest.install
    if wants.kind == "none" and not wants.files:
        return None, None
    interpreter = await interpreters.find(wants.python) if wants.kind == "pip" else None
    digest = hashlib.sha256(
        msgspec.json.encode([LAYOUT, wants, interpreter and interpreter.version, platform.machine(), sys.platform])
    )
    for name in [*wants.files, *filter(None, [wants.constraints])]:
        content = _own_file(manifest, source, name).read_bytes()
        digest.update(b"%d:%s" % (len(content), content))
    return cache_dir() / f"{manifest.name}-{manifest.version}-{digest.hexdigest()[:12]}", interpreter


def _own_file(manifest: Manifest, source: Path, name: str) -> Path:
    path = source / name
    if not path.is_file():
        raise _failed(
            "no_such_file", f"[install] of {manifest.name} names {name!r}, but {path} is not a file.", retryable=False
        )
    return path


# Building.


async def _build(
    manifest: Manifest, source: Path, target: Path, interpreter: Interpreter | None, lock: int
) -> Installed:
    _log.info("installing %s %s into %s (once; it can take minutes)", manifest.name, manifest.version, target)
    await asyncio.to_thread(disk.empty, target)
    wants = manifest.install
    if interpreter is not None:
        for command in _pip_steps(interpreter, target, wants, source):
            await _run(command, manifest, target, lock)
    await asyncio.to_thread(_copy, wants.files, source, target)
    return await asyncio.to_thread(disk.publish, target, python_prefix=interpreter.prefix if interpreter else "")


def _pip_steps(interpreter: Interpreter, target: Path, wants: Install, source: Path) -> list[list[str]]:
    """Return the commands that make the environment: with our own pip where there is one, which spares seconds."""
    python = str(target / "bin" / "python")
    venv = [interpreter.executable, "-I", "-m", "venv", str(target)]
    pip = [python, "-I", "-m", "pip"]
    if importlib.util.find_spec("pip"):
        venv.append("--without-pip")
        pip = [sys.executable, "-I", "-m", "pip", f"--python={python}"]
    constraints = [f"--constraint={source / wants.constraints}"] if wants.constraints else []
    return [venv, [*pip, "install", *PIP_OPTIONS, *constraints, *wants.packages]]


def _copy(names: list[str], source: Path, target: Path) -> None:
    for name in names:
        shutil.copyfile(source / name, target / name)
        (target / name).chmod(0o755 if os.access(source / name, os.X_OK) else 0o644)


PIP_OPTIONS = ("--no-input", "--disable-pip-version-check", "--progress-bar=off", "--prefer-binary", "--retries=2")


async def _run(command: Sequence[str], manifest: Manifest, target: Path, lock: int) -> None:
    """Run one step with its output in a log beside the install; nothing of it outlives a cancelled caller."""
    path = _log_path(target)
    env = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    with path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            env=env, umask=0o022, start_new_session=True, pass_fds=[lock],
        )  # fmt: skip
        try:
            status = await process.wait()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
    if status != 0:
        raise _step_failed(manifest, target, path.read_text(errors="replace"), status)


def _step_failed(manifest: Manifest, target: Path, log: str, status: int) -> HarnessError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    excerpt = " ".join(errors[-EXCERPT_LINES:]) or f"exit status {status}"
    what = f"Installing {manifest.name} {manifest.version} failed: {excerpt}"
    if any(sign in log for sign in OFFLINE):
        advice = (
            "No package index can be reached from here: point PIP_INDEX_URL or PIP_FIND_LINKS at one, or copy "
            f"{target} from a machine of the same kind, to the same path"
        )
        return _failed("offline", f"{what} {advice}. All of it: {_log_path(target)}", retryable=True)
    return _failed("install_failed", f"{what} (all of it: {_log_path(target)})", retryable=True)


def _log_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.log")


def _failed(code: str, message: str, *, retryable: bool) -> HarnessError:
    return HarnessError(code, message, blame=Blame.INFRA, phase=Phase.SETUP, retryable=retryable)


@contextlib.contextmanager
def _readable_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = (
            f"Cannot use the cache {target.parent}: {error}. Free some space, or set ORCHARD_CACHE to another folder."
        )
        raise _failed("cache_unusable", message, retryable=False) from error
