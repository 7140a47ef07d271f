"""Waiting for a deriver that another process runs: how far it is behind, when to say so, when to give up.

Nothing is derived here. Invariant: whoever waits hears of it within seconds, and never waits for one that stands still.
"""

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from orchard_proxy.errors import CatalogDamagedError, CatalogError, OrchardError
from orchard_proxy.record import queries
from orchard_proxy.record.catalog import Catalog
from orchard_proxy.record.queries import Progress
from orchard_proxy.record.segments import Position, list_segments, split_name

logger = logging.getLogger(__name__)

BUSY_POLL_S = 0.01
SAY_AFTER_S = 2.0
SAY_AGAIN_S = 10.0
STILL_S = 60.0
"""A batch takes a second or two; a follower that writes none for so long has stopped, or waits for its disk."""


def bytes_behind(data_dir: Path, known: dict[str, Progress], wanted: Iterable[Position]) -> int:
    """Return how many bytes of journal lie between what is derived and what is wanted."""
    total = 0
    for end in wanted:
        done = known[end.worker].done if end.worker in known else None
        for path in list_segments(data_dir).get(end.worker, []):
            start = done.offset if done is not None and path.name == done.segment else 0
            if _number(path.name) > _number(end.segment) or (done and _number(path.name) < _number(done.segment)):
                continue
            stop = end.offset if path.name == end.segment else path.stat().st_size
            total += max(stop - start, 0)
    return total


def _number(name: str) -> int:
    return split_name(name)[1]


class Patience:
    """How long one has waited, and whether anything moves."""

    def __init__(self, data_dir: Path, timeout_s: float) -> None:
        self._data_dir = data_dir
        self._timeout_s = timeout_s
        now = time.monotonic()
        self._began = self._moved = now
        self._say_at = now + SAY_AFTER_S
        self._known: dict[str, Progress] | None = None

    def look(self, known: dict[str, Progress], wanted: list[Position]) -> None:
        """Say how far it is, now and then. Raise OrchardError when there is no use in waiting on."""
        now = time.monotonic()
        if known != self._known:
            self._known, self._moved = known, now
        if now >= self._say_at:
            self._say_at = now + SAY_AGAIN_S
            behind = bytes_behind(self._data_dir, known, wanted)
            logger.warning("waiting for the deriver of %s, %d bytes behind", self._data_dir, behind)
        if now - self._moved > STILL_S or now - self._began > self._timeout_s:
            behind = bytes_behind(self._data_dir, known, wanted)
            raise OrchardError(
                f"the deriver that runs on {self._data_dir} did not get to the end within {now - self._began:.0f} s: "
                f"it is {behind} bytes behind. See what it logs, or stop `orchard serve` there and try again."
            )


def wait_for(data_dir: Path, positions: Iterable[Position], timeout_s: float, patience: Patience | None = None) -> bool:
    """Wait until everything before the positions is in the catalog. False: not within `timeout_s`.

    With `patience`, waiting is told on the log, and OrchardError is raised when it is in vain.
    """
    wanted = list(positions)
    until = time.monotonic() + timeout_s
    with _Eye(data_dir) as eye:
        while True:
            known = eye.progress()
            if all(queries.reached(known, position) for position in wanted):
                return True
            if patience is not None:
                patience.look(known, wanted)
            if time.monotonic() >= until:
                return False
            time.sleep(BUSY_POLL_S)


class _Eye:
    """Looks at the catalog that lies there now, whichever that is."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._catalog: Catalog | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def progress(self) -> dict[str, Progress]:
        """Return how far it is derived; nothing while it is being taken away or made. Raise CatalogDamagedError."""
        try:
            if self._catalog is not None and self._catalog.replaced:
                self._close()
            self._catalog = self._catalog or Catalog.open(self._data_dir)
            return self._catalog.progress()
        except CatalogDamagedError:
            raise
        except CatalogError as error:
            logger.debug("%s", error)
            self._close()
            return {}

    def _close(self) -> None:
        if self._catalog is not None:
            self._catalog.close()
            self._catalog = None
