"""What the control plane reads: the catalog, once the deriver has caught up with what was asked about.

A rollout that is known but not derived yet is answered from the registry's state, so that what POST returned can
always be read back.
"""

from pathlib import Path
from types import TracebackType
from typing import Self

from orchard_proxy.record.catalog_reader import CatalogReader
from orchard_proxy.record.journal import Journal
from orchard_proxy.record.queries import Filter
from orchard_proxy.schema.records import Call, Rollout


class Reading:
    """Read-only view of the catalog of one data directory."""

    def __init__(self, data_dir: Path, journal: Journal) -> None:
        self._data_dir = data_dir
        self._journal = journal
        self._reader: CatalogReader | None = None

    async def __aenter__(self) -> Self:
        self._reader = await CatalogReader.open(self._data_dir)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._catalog.aclose()

    async def caught_up(self, wait_s: float) -> bool:
        """Wait until everything journaled so far is in the catalog. False: not within `wait_s`."""
        self._journal.flush()  # What was said lazily, a delivery say, counts too.
        return await self._catalog.wait_for([self._journal.position()], wait_s)

    async def rollouts(self, *, wanted: Filter, after: str | None, limit: int) -> list[Rollout]:
        """List rollouts in the order of their start."""
        return await self._catalog.rollouts(wanted, limit=limit, after=after)

    async def rollout(self, rollout_id: str) -> Rollout:
        """Return one rollout; of one that is not derived yet, only its id is known."""
        return await self._catalog.rollout(rollout_id) or Rollout(rollout_id=rollout_id)

    async def calls(self, rollout_id: str) -> list[Call]:
        """Return its calls in commit order."""
        return await self._catalog.calls(rollout_id)

    @property
    def _catalog(self) -> CatalogReader:
        assert self._reader is not None
        return self._reader
