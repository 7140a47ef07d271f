"""The catalog's tables: scalar columns as `schema.columns` lists them, and the whole record as one msgpack blob.

Columns are what SQL selects, orders and counts by; the blob is what a reader gets. Only `outcome` and `delivery` of a
call change after it was written, so there the column counts, not the blob. Types are those that SQLite and PostgreSQL
share; times are microseconds since the epoch, which neither rounds.
"""

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.types import TypeEngine

from orchard_proxy.schema.columns import CALLS, ROLLOUTS, Column, Kind

CATALOG_VERSION = 2
"""Raise it when a stored catalog must be derived again to be read."""

_SQL_TYPES: dict[Kind, type[TypeEngine[Any]]] = {
    Kind.STR: sa.Text,
    Kind.INT64: sa.BigInteger,
    Kind.INT32: sa.Integer,
    Kind.FLOAT64: sa.Double,
    Kind.BOOL: sa.Boolean,
    Kind.TIME: sa.BigInteger,
}

METADATA = sa.MetaData()


def _table(name: str, key: str, columns: Iterable[Column], *more: sa.Column[Any]) -> sa.Table:
    rendered = [
        sa.Column(
            column.name,
            _SQL_TYPES[column.kind],
            primary_key=column.name == key,
            nullable=column.nullable,
            index=column.indexed and column.name != key,
        )
        for column in columns
        if column.kind in _SQL_TYPES
    ]
    return sa.Table(name, METADATA, *rendered, *more, sa.Column("record", sa.LargeBinary, nullable=False))


rollouts = _table("rollouts", "rollout_id", ROLLOUTS)
"""`record` is a msgpack Rollout."""

calls = _table("calls", "call_id", CALLS)
"""`record` is a msgpack StoredCall."""

progress = sa.Table(
    "progress",
    METADATA,
    sa.Column("worker", sa.Text, primary_key=True),
    sa.Column("segment", sa.Text, nullable=False),
    sa.Column("offset", sa.BigInteger, nullable=False),
    sa.Column("resume_segment", sa.Text, nullable=False),
    sa.Column("resume_offset", sa.BigInteger, nullable=False),
    sa.Column("commits", sa.BigInteger, nullable=False),
)
"""How far the journal is derived, per worker; where reading must begin again; how many calls were committed so far."""

damages = sa.Table(
    "damages",
    METADATA,
    sa.Column("place", sa.Text, primary_key=True),
    sa.Column("segment", sa.Text, nullable=False),
    sa.Column("offset", sa.BigInteger, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),
)
"""Stretches of the journal that could not be derived; `place` is segment and offset."""

meta = sa.Table(
    "meta",
    METADATA,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.BigInteger, nullable=False),
)

sa.Index("ix_rollouts_started", rollouts.c.started_at, rollouts.c.rollout_id)
sa.Index("ix_calls_order", calls.c.rollout_id, calls.c.commit_seq)


def creation() -> list[sa.schema.ExecutableDDLElement]:
    """Return the statements that create what is missing; safe when two processes run them at once."""
    statements: list[sa.schema.ExecutableDDLElement] = []
    for table in METADATA.sorted_tables:
        statements.append(sa.schema.CreateTable(table, if_not_exists=True))
        statements += [sa.schema.CreateIndex(index, if_not_exists=True) for index in sorted(table.indexes, key=_name)]
    return statements


def _name(index: sa.Index) -> str:
    return str(index.name)
