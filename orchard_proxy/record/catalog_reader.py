"""The catalog as the server reads it: asynchronously, beside the deriver that writes it.

Nothing is written here but empty tables, where the server starts before the deriver has made them. Invariant: what is
read is the file that lies there now; one that was deleted or replaced under us is not read on.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from orchard_proxy.errors import CatalogDamagedError, CatalogError
from orchard_proxy.record import catalog_file, queries, stored, tables
from orchard_proxy.record.queries import Filter, Progress
from orchard_proxy.record.segments import Position
from orchard_proxy.schema.records import Call, Rollout

logger = logging.getLogger(__name__)

POLL_S = 0.01


class CatalogReader:
    """Reads the catalog of one data folder. Make it with `open`; end it with `aclose` or `async with`."""

    def __init__(self, engine: AsyncEngine, data_dir: Path) -> None:
        self._engine = engine
        self._data_dir = data_dir
        self._file: tuple[int, int] | None = None
        self._looking = asyncio.Lock()

    @classmethod
    async def open(cls, data_dir: Path) -> Self:
        """Open the catalog, making its empty tables where there are none. Raise CatalogError."""
        data_dir = Path(data_dir)
        url = sa.URL.create("sqlite+aiosqlite", database=str(catalog_file.path_of(data_dir)))
        engine = create_async_engine(url)
        sa.event.listen(engine.sync_engine, "connect", queries.prepare_sqlite)
        catalog_file.explain(engine.sync_engine, data_dir)
        reader = cls(engine, data_dir)
        try:
            await reader._begin()
        except BaseException:
            await reader.aclose()
            raise
        return reader

    async def _begin(self) -> None:
        async with self._engine.begin() as connection:
            for statement in tables.creation():
                await connection.execute(statement)
        self._file = catalog_file.identity(self._data_dir)[0]

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncConnection]:
        await self._look()
        file = self._file
        async with self._engine.connect() as connection:
            try:
                yield connection
            finally:
                if file != self._file:
                    await connection.invalidate()  # it came from the pool that was disposed of meanwhile

    async def _look(self) -> None:
        """Begin again when the file is another one."""
        async with self._looking:
            if catalog_file.identity(self._data_dir)[0] != self._file:
                logger.warning("the catalog of %s was deleted or replaced; reading the new one", self._data_dir)
                await self._engine.dispose()
                await self._begin()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._engine.dispose()

    async def progress(self) -> dict[str, Progress]:
        """Return how far each worker's journal is derived."""
        async with self._connected() as connection:
            return queries.progress_of(await connection.execute(queries.progress()))

    async def _progress_if_any(self) -> dict[str, Progress]:
        try:
            return await self.progress()
        except CatalogDamagedError:
            raise
        except CatalogError as error:  # it is being taken away, or made
            logger.debug("%s", error)
            return {}

    async def wait_for(self, positions: Iterable[Position], timeout_s: float) -> bool:
        """Wait until everything before the positions is in the catalog. False: not within `timeout_s`."""
        wanted = list(positions)
        until = asyncio.get_running_loop().time() + timeout_s
        while True:
            known = await self._progress_if_any()
            if all(queries.reached(known, position) for position in wanted):
                return True
            if asyncio.get_running_loop().time() >= until:
                return False
            await asyncio.sleep(POLL_S)

    async def rollout(self, rollout_id: str) -> Rollout | None:
        """Return one rollout; None when it is not (yet) known."""
        async with self._connected() as connection:
            row = (await connection.execute(queries.rollout(rollout_id))).first()
        return stored.rollout_of(row) if row is not None else None

    async def rollouts(
        self, wanted: Filter | None = None, *, limit: int = 100, after: str | None = None
    ) -> list[Rollout]:
        """Return up to `limit` rollouts in the order of their start, behind the one called `after`."""
        async with self._connected() as connection:
            query = queries.rollouts(wanted or Filter(), limit=limit, after=after)
            return [stored.rollout_of(row) for row in await connection.execute(query)]

    async def calls(self, rollout_id: str) -> list[Call]:
        """Return the calls of a rollout in commit order."""
        async with self._connected() as connection:
            return list(stored.calls_of(await connection.execute(queries.calls(rollout_id))))
