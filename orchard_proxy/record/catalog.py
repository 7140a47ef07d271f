"""The catalog: what the journal says, in tables. Derived, never the truth; `orchard derive --rebuild` makes it again.

This is the synchronous side: the deriver, its only writer, and readers outside the server. The server reads through
`catalog_reader`. Invariant: rows and the progress that they stand for are written in one transaction, so that the
catalog is always exactly what the journal says up to `progress`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from orchard_proxy.errors import CatalogError, OrchardError
from orchard_proxy.record import catalog_file, queries, stored, tables
from orchard_proxy.record.catalog_file import CATALOG_NAME
from orchard_proxy.record.queries import Filter, Progress
from orchard_proxy.schema.enums import Outcome
from orchard_proxy.schema.records import Call, JournalDamage, Rollout

__all__ = ["CATALOG_NAME", "Batch", "Catalog"]

PAGE_ROWS = 200
_INSERT: dict[str, Callable[[sa.Table], sqlite.Insert | postgresql.Insert]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}


@dataclass(slots=True)
class Batch:
    """One transaction of the deriver. Confirmations concern calls that earlier transactions wrote."""

    confirmed_calls: set[str] = field(default_factory=set)
    confirmed_rollouts: set[str] = field(default_factory=set)
    failed_calls: dict[str, Outcome] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    damages: list[JournalDamage] = field(default_factory=list)
    progress: dict[str, Progress] = field(default_factory=dict)


class Catalog:
    """The catalog of one data folder."""

    def __init__(self, engine: sa.Engine, data_dir: Path) -> None:
        self._engine = engine
        self._data_dir = data_dir
        self._identity: catalog_file.Identity = ()

    @classmethod
    def open(cls, data_dir: Path) -> Self:
        """Open the catalog of a data folder, making an empty one where there is none; only to read where it must be.

        Raise CatalogDamagedError when the file is no catalog, CatalogError when it cannot be used.
        """
        data_dir = Path(data_dir)
        catalog = cls(catalog_file.engine(data_dir), data_dir)
        try:
            if catalog_file.is_read_only(data_dir):
                catalog._check_version()
            else:
                catalog._create()
        except BaseException:
            catalog.close()
            raise
        catalog._identity = catalog_file.identity(data_dir)
        return catalog

    @property
    def replaced(self) -> bool:
        """Say whether the file was deleted or replaced since it was opened: what is open here, nobody else sees."""
        return catalog_file.identity(self._data_dir) != self._identity

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _create(self) -> None:
        with self._engine.begin() as connection:
            for statement in tables.creation():
                connection.execute(statement)
            version = connection.scalar(queries.version())
        if version is None:
            self._stamp()
        elif version > tables.CATALOG_VERSION:
            raise OrchardError(f"the catalog was made by a newer Orchard (version {version}). Use that one.")
        elif version < tables.CATALOG_VERSION:
            self.clear()

    def _check_version(self) -> None:
        with self._engine.connect() as connection:
            version = connection.scalar(queries.version())
        if version != tables.CATALOG_VERSION:
            raise CatalogError(
                f"the catalog of {self._data_dir} was made by another version of Orchard, and the folder cannot be "
                "written, so it cannot be derived again there. Copy the folder to a place that can be written, and "
                "give that one to --data."
            )

    def _stamp(self) -> None:
        row = {"name": "version", "value": tables.CATALOG_VERSION}
        with self._engine.begin() as connection:
            self._upsert(connection, tables.meta, "name", [row])

    def clear(self) -> None:
        """Drop everything, so that the journal is derived from its beginning."""
        with self._engine.begin() as connection:
            tables.METADATA.drop_all(connection)
            for statement in tables.creation():
                connection.execute(statement)
        self._stamp()

    def write(self, batch: Batch) -> None:
        """Write one batch, all of it or nothing."""
        with self._engine.begin() as connection:
            self._settle(connection, batch)
            self._upsert(connection, tables.calls, "call_id", batch.calls)
            self._upsert(connection, tables.rollouts, "rollout_id", batch.rollouts)
            self._upsert(connection, tables.damages, "place", list(map(_damage_row, batch.damages)))
            self._upsert(connection, tables.progress, "worker", list(map(_progress_row, batch.progress.values())))

    def _settle(self, connection: sa.Connection, batch: Batch) -> None:
        """Update what is now known of calls that are in the catalog already."""
        if batch.confirmed_calls:
            ids = [{"id": call_id} for call_id in sorted(batch.confirmed_calls)]
            connection.execute(queries.CONFIRM_CALL, ids)
        if batch.confirmed_rollouts:
            ids = [{"id": rollout_id} for rollout_id in sorted(batch.confirmed_rollouts)]
            connection.execute(queries.CONFIRM_ROLLOUT, ids)
        if batch.failed_calls:
            failed = [{"id": call_id, "failed_as": str(outcome)} for call_id, outcome in batch.failed_calls.items()]
            connection.execute(queries.FAIL_CALL, failed)

    def _upsert(self, connection: sa.Connection, table: sa.Table, key: str, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        insert = _INSERT[connection.dialect.name](table)
        changed = {column.name: insert.excluded[column.name] for column in table.columns if column.name != key}
        connection.execute(insert.on_conflict_do_update(index_elements=[key], set_=changed), rows)

    def progress(self) -> dict[str, Progress]:
        """Return how far each worker's journal is derived."""
        with self._engine.connect() as connection:
            return queries.progress_of(connection.execute(queries.progress()))

    def damages(self) -> list[JournalDamage]:
        """Return what of the journal could not be derived."""
        with self._engine.connect() as connection:
            rows = connection.execute(queries.damages()).all()
        return [JournalDamage(segment=row.segment, offset=row.offset, bytes=row.bytes) for row in rows]

    def rollout(self, rollout_id: str) -> Rollout | None:
        """Return one rollout; None when it is not (yet) known."""
        with self._engine.connect() as connection:
            row = connection.execute(queries.rollout(rollout_id)).first()
        return stored.rollout_of(row) if row is not None else None

    def totals(self, rollout_id: str) -> tuple[int, int]:
        """Return the number of calls and of sampled tokens."""
        with self._engine.connect() as connection:
            row = connection.execute(queries.rollout(rollout_id)).first()
        return (row.calls, row.sampled_tokens) if row is not None else (0, 0)

    def rollouts(self, wanted: Filter | None = None, *, limit: int = 100, after: str | None = None) -> list[Rollout]:
        """Return up to `limit` rollouts in the order of their start, behind the one called `after`."""
        with self._engine.connect() as connection:
            rows = connection.execute(queries.rollouts(wanted or Filter(), limit=limit, after=after)).all()
        return [stored.rollout_of(row) for row in rows]

    def newest_rollouts(self, wanted: Filter | None = None, *, limit: int = 100) -> list[Rollout]:
        """Return the last `limit` rollouts, in the order of their start."""
        with self._engine.connect() as connection:
            rows = connection.execute(queries.rollouts(wanted or Filter(), limit=limit, newest=True)).all()
        return [stored.rollout_of(row) for row in reversed(rows)]

    def iter_rollouts(self, wanted: Filter | None = None) -> Iterator[Rollout]:
        """Iterate over all rollouts in the order of their start, a page at a time."""
        after = None
        while page := self.rollouts(wanted, limit=PAGE_ROWS, after=after):
            yield from page
            after = page[-1].rollout_id

    def calls(self, rollout_id: str) -> list[Call]:
        """Return the calls of a rollout in commit order."""
        with self._engine.connect() as connection:
            return list(stored.calls_of(connection.execute(queries.calls(rollout_id))))

    def call_exists(self, call_id: str) -> bool:
        """Say whether a call is in the catalog."""
        with self._engine.connect() as connection:
            return connection.scalar(queries.call_exists(call_id)) is not None


def _progress_row(one: Progress) -> dict[str, Any]:
    return {
        "worker": one.done.worker,
        "segment": one.done.segment,
        "offset": one.done.offset,
        "resume_segment": one.resume.segment,
        "resume_offset": one.resume.offset,
        "commits": one.commits,
    }


def _damage_row(one: JournalDamage) -> dict[str, Any]:
    return {"place": f"{one.segment}:{one.offset}", **msgspec.structs.asdict(one)}
