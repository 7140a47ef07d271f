"""The catalog's questions as SQLAlchemy statements, shared by its synchronous and its asynchronous readers."""

from typing import Any

import msgspec
import sqlalchemy as sa

from orchard_proxy.record import tables
from orchard_proxy.record.segments import Position
from orchard_proxy.schema.enums import Delivery, RolloutStatus

BUSY_MS = 10_000
"""A reader never waits for the writer in WAL mode; two that create the tables at once may."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far one worker's journal is derived."""

    done: Position
    """Everything before it is in the catalog."""
    resume: Position
    """Where the first call begins that was still open at `done`: reading must begin again there."""
    commits: int
    """Calls committed before `done`, over all workers: the next `commit_seq`."""


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which rollouts are wanted; None = any."""

    status: RolloutStatus | str | None = None
    group_id: str | None = None
    task_id: str | None = None
    run_id: str | None = None


def prepare_sqlite(connection: Any, _record: object) -> None:
    """Set up one SQLite connection: readers beside the writer, no fsync a transaction (the journal is the truth)."""
    cursor = connection.cursor()
    for pragma in (f"busy_timeout = {BUSY_MS}", "journal_mode = WAL", "synchronous = NORMAL"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


CONFIRM_CALL = (
    sa.update(tables.calls)
    .where(tables.calls.c.call_id == sa.bindparam("id"), tables.calls.c.delivery == str(Delivery.UNCERTAIN))
    .values(delivery=str(Delivery.CONFIRMED))
)
CONFIRM_ROLLOUT = (
    sa.update(tables.calls)
    .where(
        tables.calls.c.rollout_id == sa.bindparam("id"),
        tables.calls.c.delivery == str(Delivery.UNCERTAIN),
        tables.calls.c.late.is_(False),
    )
    .values(delivery=str(Delivery.CONFIRMED))
)
"""The runner has finished the rollout, so it has seen the answers; a late call ended after that."""
FAIL_CALL = (
    sa.update(tables.calls)
    .where(tables.calls.c.call_id == sa.bindparam("id"))
    .values(outcome=sa.bindparam("failed_as"), delivery=str(Delivery.NONE))
)


def version() -> sa.Select[Any]:
    """Select the version that the catalog was made with."""
    return sa.select(tables.meta.c.value).where(tables.meta.c.name == "version")


def progress() -> sa.Select[Any]:
    """Select how far the journal is derived."""
    return sa.select(tables.progress)


def progress_of(rows: sa.CursorResult[Any] | sa.Result[Any]) -> dict[str, Progress]:
    """Return the progress of each worker."""
    return {
        row.worker: Progress(
            done=Position(row.segment, row.offset),
            resume=Position(row.resume_segment, row.resume_offset),
            commits=row.commits,
        )
        for row in rows
    }


def reached(known: dict[str, Progress], wanted: Position) -> bool:
    """Say whether everything before `wanted` is in the catalog."""
    at = known.get(wanted.worker)
    return at is not None and at.done >= wanted


def rollout(rollout_id: str) -> sa.Select[Any]:
    """Select one rollout."""
    return sa.select(tables.rollouts).where(tables.rollouts.c.rollout_id == rollout_id)


def rollouts(wanted: Filter, *, limit: int, after: str | None = None, newest: bool = False) -> sa.Select[Any]:
    """Select rollouts in the order of their start, behind `after`; an unknown `after` selects none.

    With `newest`, the last `limit` of them, in the reverse order.
    """
    table = tables.rollouts
    order = (table.c.started_at, table.c.rollout_id)
    query = sa.select(table).order_by(*(column.desc() if newest else column for column in order)).limit(limit)
    for name in wanted.__struct_fields__:
        if (value := getattr(wanted, name)) is not None:
            query = query.where(table.c[name] == str(value))
    if after is not None:
        start = sa.select(table.c.started_at).where(table.c.rollout_id == after).scalar_subquery()
        query = query.where(
            sa.or_(table.c.started_at > start, sa.and_(table.c.started_at == start, table.c.rollout_id > after))
        )
    return query


def calls(rollout_id: str) -> sa.Select[Any]:
    """Select what is needed to read a rollout's calls, in commit order."""
    table = tables.calls
    columns = (table.c.record, table.c.outcome, table.c.delivery)
    return sa.select(*columns).where(table.c.rollout_id == rollout_id).order_by(table.c.commit_seq)


def damages() -> sa.Select[Any]:
    """Select what of the journal could not be derived, in the order of the journal."""
    table = tables.damages
    return sa.select(table).order_by(sa.func.length(table.c.segment), table.c.segment, table.c.offset)


def call_exists(call_id: str) -> sa.Select[Any]:
    """Select one call's id."""
    return sa.select(tables.calls.c.call_id).where(tables.calls.c.call_id == call_id)
