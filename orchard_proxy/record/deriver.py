"""The deriver: who may fill the catalog, when, and how others wait for it.

One process at a time (an flock on DATA/derive.lock), which may be killed at any moment: the next goes on from the
catalog's own position. Invariant: `derive` and `follow` end only with everything derived that was in the journal when
they were told to end.
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from orchard_proxy.errors import OrchardError, UsageError
from orchard_proxy.record import lock, queries
from orchard_proxy.record.catalog import CATALOG_NAME, Catalog
from orchard_proxy.record.derivation import Derivation
from orchard_proxy.record.reader import end_of_journal
from orchard_proxy.record.segments import Position, list_segments, split_name

logger = logging.getLogger(__name__)

LOCK_NAME = "derive.lock"
BUSY_POLL_S = 0.01
IDLE_POLL_S = 0.04
"""An idle follower looks 25 times a second; a call is in the catalog well within 100 ms of its END."""
IDLE_AFTER_S = 2.0
RETRY_S = 1.0
WAIT_S = 600.0
INIT_PID = 1
ORPHAN_LOOK_S = 1.0
"""Looking takes the server's lock for some microseconds, so it is done seldom."""


def derive(data_dir: Path, *, rebuild: bool = False, timeout_s: float = WAIT_S) -> None:
    """Derive everything that is in the journal now; where a follower is at work, wait for it instead.

    Raise UsageError when there is no journal, OrchardError when a follower does not get there in `timeout_s`.
    """
    data_dir = Path(data_dir)
    _refuse_nothing(data_dir)
    with _locked(data_dir) as ours:
        if ours:
            _derive_alone(data_dir, rebuild=rebuild)
            return
    if rebuild:
        raise OrchardError(f"another process derives {data_dir} now. Stop `orchard serve` before a rebuild.")
    if not wait_for(data_dir, end_of_journal(data_dir).values(), timeout_s):
        raise OrchardError(f"the deriver that runs on {data_dir} did not get to the end within {timeout_s:g} s")


def follow(data_dir: Path, parent_pid: int | None, stopping: Callable[[], bool] = lambda: False) -> None:
    """Derive as the journal grows, until the parent is gone or `stopping` says so, and then what is left."""
    data_dir = Path(data_dir)
    data_dir.mkdir(parents=True, exist_ok=True)
    over = _End(data_dir, parent_pid, stopping)
    while True:
        with _locked(data_dir) as ours:
            if ours:
                _follow_alone(data_dir, over)
                return
        if over():
            return  # whoever holds the lock goes on to the end
        time.sleep(IDLE_POLL_S)


def wait_for(data_dir: Path, positions: Iterable[Position], timeout_s: float) -> bool:
    """Wait until everything before the positions is in the catalog. False: not within `timeout_s`."""
    wanted = list(positions)
    until = time.monotonic() + timeout_s
    with Catalog.open(data_dir) as catalog:
        while True:
            known = catalog.progress()
            if all(queries.reached(known, position) for position in wanted):
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(BUSY_POLL_S)


def _derive_alone(data_dir: Path, *, rebuild: bool) -> None:
    with Catalog.open(data_dir) as catalog:
        if rebuild:
            _refuse_loss(data_dir, catalog)
            catalog.clear()
        derivation = Derivation(data_dir, catalog)
        _drain(derivation)
        _close_dead(data_dir, derivation)


def _follow_alone(data_dir: Path, over: Callable[[], bool]) -> None:
    while True:
        try:
            with Catalog.open(data_dir) as catalog:
                _follow_with(data_dir, Derivation(data_dir, catalog), over)
                return
        except sa.exc.DBAPIError as error:
            # A full disk, a locked file: the journal waits, and a fresh derivation goes on from what is written.
            logger.error("the catalog cannot be written: %s. Trying again in %g s.", error, RETRY_S)  # noqa: TRY400
            if over():
                raise OrchardError(f"the catalog of {data_dir} cannot be written: {error}") from error
            time.sleep(RETRY_S)


def _follow_with(data_dir: Path, derivation: Derivation, over: Callable[[], bool]) -> None:
    active = time.monotonic()
    while True:
        ending = over()  # asked before reading: what was written before the end is then read
        if _drain(derivation):
            active = time.monotonic()
        if ending:
            _close_dead(data_dir, derivation)
            return
        time.sleep(BUSY_POLL_S if time.monotonic() - active < IDLE_AFTER_S else IDLE_POLL_S)


def _drain(derivation: Derivation) -> bool:
    """Derive to the end; return whether there was anything."""
    frames = 0
    while True:
        stride = derivation.step()
        frames += stride.frames
        if not stride.more:
            return frames > 0


def _close_dead(data_dir: Path, derivation: Derivation) -> None:
    """Close calls that can never end: their server is gone. Those of a server that runs stay open."""
    if derivation.open_calls:
        alive = lock.live_session(data_dir)
        if alive is None:
            _drain(derivation)  # what it wrote between our last look and its end
        derivation.close_open(alive)


class _End:
    """Says when a follower is to end: told so, or its parent is gone.

    A parent that died before this process could look is replaced by init. A follower of init's therefore also ends
    when no server writes into the folder; where the server itself runs as process 1, one does.
    """

    def __init__(self, data_dir: Path, parent_pid: int | None, stopping: Callable[[], bool]) -> None:
        self._data_dir = data_dir
        self._parent_pid = parent_pid
        self._stopping = stopping
        self._look_again = 0.0
        self._alone = False

    def __call__(self) -> bool:
        if self._stopping():
            return True
        return self._parent_pid is not None and (os.getppid() != self._parent_pid or self._is_orphan())

    def _is_orphan(self) -> bool:
        if self._parent_pid == INIT_PID and time.monotonic() >= self._look_again:
            self._alone = lock.live_session(self._data_dir) is None
            self._look_again = time.monotonic() + ORPHAN_LOOK_S
        return self._alone


@contextmanager
def _locked(data_dir: Path) -> Iterator[bool]:
    """Hold the deriver's lock inside the context; False when another process has it."""
    fd = os.open(data_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _refuse_nothing(data_dir: Path) -> None:
    if not list_segments(data_dir) and not (data_dir / CATALOG_NAME).exists():
        raise UsageError(f"{data_dir} has no journal. Give --data the folder that `orchard serve` records into.")


def _refuse_loss(data_dir: Path, catalog: Catalog) -> None:
    """Refuse a rebuild that would forget what only the catalog still knows."""
    for worker in catalog.progress():
        paths = list_segments(data_dir).get(worker, [])
        if not paths or split_name(paths[0].name)[1] > 1:
            raise OrchardError(
                f"the first journal segments of {worker} are gone, so a rebuild would lose their rollouts. "
                f"Delete {data_dir / CATALOG_NAME} yourself if that is what you want."
            )
