"""Rules over the files of an export: the manifest's list, digests, footers, schemas."""

from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq

from orchard_proxy.errors import ExportError
from orchard_proxy.export import arrow, manifest
from orchard_proxy.export.digest import sha256
from orchard_proxy.export.manifest import FileEntry, Manifest
from orchard_proxy.export.parquet import read_footer, reading
from orchard_proxy.export.report import Findings, Rule
from orchard_proxy.schema.columns import SCHEMA_VERSION, TABLES


def check_files(folder: Path, stated: Manifest, findings: Findings) -> dict[str, list[Path]]:
    """Check every file; return those of each table whose rows can be read."""
    _check_listing(folder, stated, findings)
    readable: dict[str, list[Path]] = {table: [] for table in TABLES}
    rows = dict.fromkeys(TABLES, 0)
    for entry in stated.files:
        if not _is_inside(entry.path):
            findings.add(Rule.FILE_OUTSIDE, manifest.NAME, f"names {entry.path!r}, which is not looked at")
            continue
        path = folder / entry.path
        if not _is_file(path):
            findings.add(Rule.FILE_MISSING, entry.path, "listed in the manifest, but not there")
            continue
        _check_digest(path, entry, findings)
        if entry.table in TABLES:
            n_rows = _check_parquet(path, entry, stated, findings)
            rows[entry.table] += n_rows or 0
            if n_rows is not None:
                readable[entry.table].append(path)
    for table, n_rows in rows.items():
        if n_rows != getattr(stated.counts, table):
            findings.add(
                Rule.FILE_ROWS,
                manifest.NAME,
                f"states {getattr(stated.counts, table)} {table}, the files hold {n_rows}",
            )
    return readable


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have
        return False


def _check_listing(folder: Path, stated: Manifest, findings: Findings) -> None:
    listed = {entry.path for entry in stated.files} | {manifest.NAME}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in listed:
            findings.add(Rule.FILE_UNLISTED, name, "not listed in the manifest")


def _check_digest(path: Path, entry: FileEntry, findings: Findings) -> None:
    size = path.stat().st_size
    if size != entry.bytes:
        findings.add(Rule.FILE_HASH, entry.path, f"has {size} bytes, the manifest states {entry.bytes}")
    elif (digest := sha256(path)) != entry.sha256:
        findings.add(Rule.FILE_HASH, entry.path, f"has sha256 {digest}, the manifest states {entry.sha256}")


def _check_parquet(path: Path, entry: FileEntry, stated: Manifest, findings: Findings) -> int | None:
    """Return the number of rows; None when the rows cannot be read as the declared columns."""
    assert entry.table is not None
    try:
        with reading(path):
            metadata, schema = pq.read_metadata(path), pq.read_schema(path)
    except ExportError as error:
        findings.add(Rule.FILE_UNREADABLE, entry.path, str(error))
        return None
    if metadata.num_rows != entry.rows:
        findings.add(Rule.FILE_ROWS, entry.path, f"has {metadata.num_rows} rows, the manifest states {entry.rows}")
    _check_footer(metadata, entry, stated, findings)
    return metadata.num_rows if _check_schema(schema, entry, stated, findings) else None


def _check_footer(metadata: pq.FileMetaData, entry: FileEntry, stated: Manifest, findings: Findings) -> None:
    assert entry.table is not None
    found = read_footer(metadata)
    for key, value in stated.footer(entry.table).items():
        if found.get(key) != value:
            findings.add(Rule.FOOTER, entry.path, f"{key} is {found.get(key)}, expected {value}")


def _check_schema(schema: pa.Schema, entry: FileEntry, stated: Manifest, findings: Findings) -> bool:
    """Return whether every declared column is there once."""
    assert entry.table is not None
    declared = arrow.schema(entry.table)
    names = list(dict.fromkeys([*declared.names, *schema.names]))
    wrong = [name for name in names if not _same(declared, schema, name, stated.schema_version)]
    for name in wrong:
        have, want = (_described(one, name) for one in (schema, declared))
        findings.add(Rule.SCHEMA, entry.path, f"column {name} is {have}, declared {want}")
    # Columns of another type may still be cast, so that the rows are checked as well.
    return not [name for name in wrong if schema.names.count(name) != 1]


def _described(schema: pa.Schema, name: str) -> str:
    if schema.names.count(name) != 1:
        return "there twice" if name in schema.names else "absent"
    field = schema.field(name)
    return f"{field.type}{'' if field.nullable else ' not null'}"


def _same(declared: pa.Schema, schema: pa.Schema, name: str, version: tuple[int, int]) -> bool:
    if name in declared.names and name in schema.names:
        same: bool = declared.field(name).equals(schema.field(name))
        return same and schema.names.count(name) == 1
    # Another minor version may have more nullable columns than this code declares, or fewer.
    holder = declared if name in declared.names else schema
    return version != SCHEMA_VERSION and holder.field(name).nullable
