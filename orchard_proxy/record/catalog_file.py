"""The file that the catalog is: where it lies, whether it is still the one that was opened, and what SQLite says of it.

Not its tables. Invariants: a folder that cannot be written is opened for reading alone, and nothing is written there;
what SQLite says of a file leaves here as one sentence that says what to do.
"""

import os
import sqlite3
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa

from orchard_proxy.errors import CatalogDamagedError, CatalogError
from orchard_proxy.record import queries

CATALOG_NAME = "catalog.db"
_BESIDE = ("", "-wal", "-shm")
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
"""SQLITE_ERROR too: our statements are fixed, so one that fails has found other tables than ours."""
_ADVICE = {
    sqlite3.SQLITE_FULL: "Free space on that disk.",
    sqlite3.SQLITE_BUSY: "Another process holds it; try again.",
    sqlite3.SQLITE_READONLY: "Make the folder writable.",
    sqlite3.SQLITE_CANTOPEN: "Make the folder and the file readable and writable.",
    sqlite3.SQLITE_IOERR: "Check that disk (dmesg).",
}

Identity = tuple[tuple[int, int] | None, ...]


def path_of(data_dir: Path) -> Path:
    """Return where the catalog of a data folder is."""
    return Path(data_dir) / CATALOG_NAME


def identity(data_dir: Path) -> Identity:
    """Return which files are the catalog now. The last two change only when nobody has it open, or by force."""
    return tuple(_inode(path_of(data_dir).with_name(CATALOG_NAME + suffix)) for suffix in _BESIDE)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def remove(data_dir: Path) -> None:
    """Delete the catalog; the journal makes it again."""
    for suffix in reversed(_BESIDE):
        path_of(data_dir).with_name(CATALOG_NAME + suffix).unlink(missing_ok=True)


def is_read_only(data_dir: Path) -> bool:
    """Say whether there is a folder here that we may not write into."""
    path = path_of(data_dir)
    return Path(data_dir).is_dir() and not (
        os.access(data_dir, os.W_OK) and (not path.exists() or os.access(path, os.W_OK))
    )


def engine(data_dir: Path) -> sa.Engine:
    """Return an engine with one connection; for reading alone where the folder allows no more."""
    if is_read_only(data_dir):
        made = sa.create_engine("sqlite://", creator=lambda: _connect_to_read(data_dir), poolclass=sa.StaticPool)
    else:
        url = sa.URL.create("sqlite", database=str(path_of(data_dir)))
        made = sa.create_engine(url, poolclass=sa.StaticPool)
        sa.event.listen(made, "connect", queries.prepare_sqlite)
    explain(made, data_dir)
    return made


def _connect_to_read(data_dir: Path) -> sqlite3.Connection:
    path = path_of(data_dir)
    wal = path.with_name(f"{CATALOG_NAME}-wal")
    # Beside a writer SQLite reads its log; without one it would make files that it cannot make here.
    mode = "mode=ro" if wal.exists() and wal.stat().st_size else "mode=ro&immutable=1"
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?{mode}", uri=True, check_same_thread=False)


def explain(made: sa.Engine, data_dir: Path) -> None:
    """Make the engine raise CatalogError, or CatalogDamagedError, where SQLite cannot use the file."""

    @sa.event.listens_for(made, "handle_error", retval=True)
    def on_error(context: sa.engine.ExceptionContext) -> CatalogError | None:
        code = getattr(context.original_exception, "sqlite_errorcode", 0) & 0xFF
        if code in _DAMAGED:
            return damaged(data_dir, str(context.original_exception))
        if code not in _ADVICE:
            return None
        said = f"the catalog {path_of(data_dir)} cannot be used: {context.original_exception}. {_ADVICE[code]}"
        return CatalogError(said)


def damaged(data_dir: Path, why: str) -> CatalogDamagedError:
    """Return the error for a catalog that cannot be read."""
    return CatalogDamagedError(
        f"the catalog {path_of(data_dir)} is damaged ({why}). The journal has everything that was in it: stop "
        f"`orchard serve` if it runs there, and make it again with `orchard derive --rebuild --data {data_dir}`."
    )
