"""The deriver: who may fill the catalog, when, and how others wait for it.

One process at a time (an flock on DATA/derive.lock), which may be killed at any moment: the next goes on from the
catalog's own position. Invariant: `derive` and `follow` end only with everything derived that was in the journal when
they were told to end.
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from orchard_proxy.errors import CatalogDamagedError, CatalogError, OrchardError, UsageError
from orchard_proxy.record import catalog_file, lock
from orchard_proxy.record.catalog import Catalog
from orchard_proxy.record.derivation import Derivation
from orchard_proxy.record.reader import end_of_journal
from orchard_proxy.record.segments import Position, list_segments, split_name
from orchard_proxy.record.waiting import BUSY_POLL_S, Patience, bytes_behind, wait_for

__all__ = ["derive", "follow", "wait_for"]

logger = logging.getLogger(__name__)

LOCK_NAME = "derive.lock"
IDLE_POLL_S = 0.04
"""An idle follower looks 25 times a second; a call is in the catalog well within 100 ms of its END."""
IDLE_AFTER_S = 2.0
RETRY_S = 1.0
WAIT_S = 600.0
LOCK_LOOK_S = 5.0
"""So often one who waits for a follower looks whether it is still there; if not, it derives itself."""
INIT_PID = 1
ORPHAN_LOOK_S = 1.0
"""Looking takes the server's lock for some microseconds, so it is done seldom."""


def derive(data_dir: Path, *, rebuild: bool = False, timeout_s: float = WAIT_S) -> bool:
    """Derive everything that is in the journal now; where a follower is at work, wait for it instead.

    Return False when the folder is there but empty. A folder that cannot be written is read as it is. Raise UsageError
    when there is no journal, OrchardError when a follower does not get there in `timeout_s`, or stands still.
    """
    data_dir = Path(data_dir)
    if not _has_something(data_dir):
        return False
    if catalog_file.is_read_only(data_dir):
        _check_complete(data_dir, rebuild=rebuild)
        return True
    wanted: list[Position] = []
    patience = Patience(data_dir, timeout_s)
    while True:
        with _locked(data_dir) as ours:
            if ours:
                _derive_alone(data_dir, rebuild=rebuild)
                return True
        if rebuild:
            raise OrchardError(f"another process derives {data_dir} now. Stop `orchard serve` before a rebuild.")
        wanted = wanted or list(end_of_journal(data_dir).values())
        if wait_for(data_dir, wanted, LOCK_LOOK_S, patience):
            return True


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


def _derive_alone(data_dir: Path, *, rebuild: bool) -> None:
    if rebuild:
        _clear(data_dir)
    with Catalog.open(data_dir) as catalog:
        derivation = Derivation(data_dir, catalog)
        _drain(derivation)
        _close_dead(data_dir, derivation)


def _clear(data_dir: Path) -> None:
    """Remove the catalog, except where it is the last to know something."""
    try:
        with Catalog.open(data_dir) as catalog:
            _refuse_loss(data_dir, catalog)
    except CatalogDamagedError as error:
        logger.warning("it is made again: %s", error)
    catalog_file.remove(data_dir)


def _follow_alone(data_dir: Path, over: Callable[[], bool]) -> None:
    done = False
    while not done:
        if not catalog_file.path_of(data_dir).exists():
            catalog_file.remove(data_dir)  # a log left without its file would be taken for that of a new one
        try:
            with Catalog.open(data_dir) as catalog:
                done = _follow_with(data_dir, catalog, over)
        except CatalogDamagedError:
            raise
        except CatalogError as error:
            # A full disk, a locked file: the journal waits, and a fresh derivation goes on from what is written.
            logger.error("%s Trying again in %g s.", error, RETRY_S)  # noqa: TRY400
            if over():
                raise
            time.sleep(RETRY_S)


def _follow_with(data_dir: Path, catalog: Catalog, over: Callable[[], bool]) -> bool:
    """Derive until the end; False when the catalog was taken away, so that another must be begun."""
    derivation = Derivation(data_dir, catalog)
    active = time.monotonic()
    while True:
        ending = over()  # asked before reading: what was written before the end is then read
        if _drain(derivation):
            active = time.monotonic()
        if catalog.replaced:
            logger.warning("the catalog of %s was deleted or replaced; going on with what lies there now", data_dir)
            return False
        if ending:
            _close_dead(data_dir, derivation)
            return True
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
    alive = lock.live_session(data_dir)
    if alive is None:
        _drain(derivation)  # what it wrote between our last look and its end
        derivation.finish_tails()
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


def _has_something(data_dir: Path) -> bool:
    """Say whether anything was recorded; False for an empty folder. Raise UsageError for what is no data folder."""
    if not data_dir.is_dir():
        raise UsageError(f"{data_dir} is not there. Give --data the folder that `orchard serve` records into.")
    if not any(data_dir.iterdir()):
        logger.warning("%s is empty: nothing was recorded there yet", data_dir)
        return False
    if not list_segments(data_dir) and not catalog_file.path_of(data_dir).exists():
        raise UsageError(f"{data_dir} has no journal. Give --data the folder that `orchard serve` records into.")
    return True


def _check_complete(data_dir: Path, *, rebuild: bool) -> None:
    """Refuse to read a catalog that is not whole where it cannot be made whole."""
    advice = "Copy the folder to a place that can be written, or make it writable, and give that one to --data."
    if rebuild or not catalog_file.path_of(data_dir).exists():
        raise OrchardError(f"the catalog of {data_dir} must be derived, and the folder cannot be written. {advice}")
    with Catalog.open(data_dir) as catalog:
        known = catalog.progress()
    behind = bytes_behind(data_dir, known, end_of_journal(data_dir).values())
    open_calls = any(one.resume < one.done for one in known.values())
    if behind or (open_calls and lock.live_session(data_dir) is None):
        raise OrchardError(
            f"the catalog of {data_dir} is {behind} bytes behind its journal, and the folder cannot be written. "
            f"{advice}"
        )


def _refuse_loss(data_dir: Path, catalog: Catalog) -> None:
    """Refuse a rebuild that would forget what only the catalog still knows."""
    for worker in catalog.progress():
        paths = list_segments(data_dir).get(worker, [])
        if not paths or split_name(paths[0].name)[1] > 1:
            raise OrchardError(
                f"the first journal segments of {worker} are gone, so a rebuild would lose their rollouts. "
                f"Delete {catalog_file.path_of(data_dir)} yourself if that is what you want."
            )
