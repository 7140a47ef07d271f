"""The rollout states that the deriver keeps in memory, up to a limit; the others are built again from the catalog.

Invariant: nothing is dropped that was not written yet; `trim` is called only when everything is.
"""

from collections import OrderedDict

from orchard_proxy.record.catalog import Catalog
from orchard_proxy.record.rollout_state import RolloutState
from orchard_proxy.schema.records import Rollout


class HeldStates:
    """The rollout states that memory has room for, least recently used first."""

    def __init__(self, catalog: Catalog, limit_bytes: int) -> None:
        self._catalog = catalog
        self._limit_bytes = limit_bytes
        self._held: OrderedDict[str, RolloutState] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._total_bytes = 0

    def get(self, rollout_id: str, seen_us: int) -> RolloutState:
        """Return a rollout's state, from the catalog where it is not held, new where nobody knows it."""
        state = self._held.get(rollout_id)
        if state is None:
            state = self._held[rollout_id] = self._load(rollout_id, seen_us)
        self._held.move_to_end(rollout_id)
        return state

    def held(self, rollout_id: str) -> RolloutState:
        """Return a state that is surely held, because it was not written yet."""
        return self._held[rollout_id]

    def trim(self, touched: set[str]) -> None:
        """Drop what is finished or over the limit. Call it only when everything is written."""
        for rollout_id in touched:
            state = self._held[rollout_id]
            self._total_bytes += state.size_bytes - self._sizes.get(rollout_id, 0)
            self._sizes[rollout_id] = state.size_bytes
            if state.rollout.finished_us is not None and not state.rollout.implicit:
                self._drop(rollout_id)
        while self._total_bytes > self._limit_bytes and self._held:
            self._drop(next(iter(self._held)))

    def _drop(self, rollout_id: str) -> None:
        del self._held[rollout_id]
        self._total_bytes -= self._sizes.pop(rollout_id)

    def _load(self, rollout_id: str, seen_us: int) -> RolloutState:
        rollout = self._catalog.rollout(rollout_id)
        if rollout is None:
            return RolloutState(Rollout(rollout_id=rollout_id, started_us=seen_us))
        state = RolloutState(rollout, *self._catalog.totals(rollout_id))
        state.restore(self._catalog.calls(rollout_id))
        return state
