"""The catalog as the server reads it: asynchronously, beside the deriver that writes it.

Nothing is written here but empty tables, where the server starts before the deriver has made them.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from orchard_proxy.record import queries, stored, tables
from orchard_proxy.record.catalog import CATALOG_NAME
from orchard_proxy.record.queries import Filter, Progress
from orchard_proxy.record.segments import Position
from orchard_proxy.schema.records import Call, Rollout

POLL_S = 0.01


class CatalogReader:
    """Reads the catalog of one data folder. Make it with `open`; end it with `aclose` or `async with`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @classmethod
    async def open(cls, data_dir: Path) -> Self:
        """Open the catalog, making its empty tables where there are none."""
        engine = create_async_engine(f"sqlite+aiosqlite:///{Path(data_dir) / CATALOG_NAME}")
        sa.event.listen(engine.sync_engine, "connect", queries.prepare_sqlite)
        async with engine.begin() as connection:
            for statement in tables.creation():
                await connection.execute(statement)
        return cls(engine)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._engine.dispose()

    async def progress(self) -> dict[str, Progress]:
        """Return how far each worker's journal is derived."""
        async with self._engine.connect() as connection:
            return queries.progress_of(await connection.execute(queries.progress()))

    async def wait_for(self, positions: Iterable[Position], timeout_s: float) -> bool:
        """Wait until everything before the positions is in the catalog. False: not within `timeout_s`."""
        wanted = list(positions)
        until = asyncio.get_running_loop().time() + timeout_s
        while True:
            known = await self.progress()
            if all(queries.reached(known, position) for position in wanted):
                return True
            if asyncio.get_running_loop().time() >= until:
                return False
            await asyncio.sleep(POLL_S)

    async def rollout(self, rollout_id: str) -> Rollout | None:
        """Return one rollout; None when it is not (yet) known."""
        async with self._engine.connect() as connection:
            row = (await connection.execute(queries.rollout(rollout_id))).first()
        return stored.rollout_of(row) if row is not None else None

    async def rollouts(
        self, wanted: Filter | None = None, *, limit: int = 100, after: str | None = None
    ) -> list[Rollout]:
        """Return up to `limit` rollouts in the order of their start, behind the one called `after`."""
        async with self._engine.connect() as connection:
            query = queries.rollouts(wanted or Filter(), limit=limit, after=after)
            return [stored.rollout_of(row) for row in await connection.execute(query)]

    async def calls(self, rollout_id: str) -> list[Call]:
        """Return the calls of a rollout in commit order."""
        async with self._engine.connect() as connection:
            return list(stored.calls_of(await connection.execute(queries.calls(rollout_id))))
