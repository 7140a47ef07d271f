"""A folder that appears whole or not at all.

The folder is filled under a temporary name beside its place, synced, and renamed into it; an old export is exchanged
in one system call where the kernel can. Whoever dies on the way leaves the old export untouched and a temporary
folder, which the next run removes: its writer holds a lock on it for as long as it lives.
"""

import ctypes
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchard_proxy.errors import ExportError, UsageError
from orchard_proxy.export import manifest
from orchard_proxy.schema.columns import TABLES

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def staged(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield an empty folder to fill; on a clean exit it takes the place of `out`, else it is removed."""
    out = out.resolve()
    _check_target(out, overwrite=overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(out)
    stage = out.with_name(f"{_prefix(out)}{secrets.token_hex(4)}")
    stage.mkdir()
    lock = _locked(stage)
    assert lock is not None
    try:
        yield stage
        _sync_tree(stage)
        _check_target(out, overwrite=overwrite)
        _replace(stage, out)
        _sync(out.parent)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        os.close(lock)


def _prefix(out: Path) -> str:
    return f".{out.name}.export-"


def _check_target(out: Path, *, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir():
        raise UsageError(f"{out} is a file; --out names a folder.")
    if not overwrite:
        raise UsageError(f"{out} exists already; choose another folder, or replace it with --overwrite.")
    foreign = sorted(path.name for path in out.iterdir() if path.name not in {*TABLES, manifest.NAME, manifest.CARD})
    if foreign or not (out / manifest.NAME).is_file():
        what = f"it holds {foreign[0]}" if foreign else f"it has no {manifest.NAME}"
        raise ExportError(f"{out} does not look like an Orchard export ({what}), so --overwrite leaves it alone.")


def _remove_abandoned(out: Path) -> None:
    for stage in out.parent.glob(f"{_prefix(out)}*"):
        lock = _locked(stage)
        if lock is not None:
            shutil.rmtree(stage, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path) -> int | None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _replace(stage: Path, out: Path) -> None:
    if not out.exists() or not any(out.iterdir()):
        stage.rename(out)
    elif not _exchanged(stage, out):
        old = out.with_name(f"{_prefix(out)}{secrets.token_hex(4)}")
        out.rename(old)
        stage.rename(out)
        shutil.rmtree(old)


def _exchanged(stage: Path, out: Path) -> bool:
    """Exchange two folders in one step (Linux renameat2); False where the kernel or the file system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    result: int = call(_AT_FDCWD, os.fsencode(stage), _AT_FDCWD, os.fsencode(out), _RENAME_EXCHANGE)
    return result == 0


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
