"""What the control plane reads: the catalog, once the deriver has caught up with what was asked about."""

from pathlib import Path
from typing import Self

from orchard_proxy.record.journal import Journal
from orchard_proxy.schema.records import Call, Rollout


class Reading:
    """Read-only view of the catalog of one data directory."""

    def __init__(self, data_dir: Path, journal: Journal) -> None:
        self._data_dir = data_dir
        self._journal = journal

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def caught_up(self, wait_s: float) -> bool:
        """Wait until everything journaled so far is in the catalog. False: not within `wait_s`."""
        raise NotImplementedError

    async def rollouts(
        self, *, status: str | None, group_id: str | None, after: str | None, limit: int
    ) -> list[Rollout]:
        """List rollouts by id."""
        raise NotImplementedError

    async def rollout(self, rollout_id: str) -> Rollout:
        """Return one rollout."""
        raise NotImplementedError

    async def calls(self, rollout_id: str) -> list[Call]:
        """Return its calls in commit order."""
        raise NotImplementedError
