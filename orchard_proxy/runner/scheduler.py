"""Runs jobs side by side, in their order, with new attempts where infrastructure failed; stops in two steps.

Draining: no new rollout begins, those that run end as they would. Stopping: the running ones are cancelled, and finish
as aborted. No rollout begins while the policy server is known to be down: an outage costs those that run, not the rest.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from orchard_proxy.runner import verdict
from orchard_proxy.runner.plan import Job
from orchard_proxy.runner.rollout import Attempt, Ended, House

logger = logging.getLogger(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 10.0
_READY_EVERY_S = 0.5


class Watcher(Protocol):
    """Who is told of the run's progress."""

    def begun(self, job: Job, rollout_id: str) -> None:
        """Tell that an attempt began."""
        ...

    def ended(self, job: Job, ended: Ended, *, final: bool) -> None:
        """Tell that an attempt ended; not `final`: the slot is tried again."""
        ...

    def waits(self, problem: str | None) -> None:
        """Tell why no rollout begins just now; None: nothing is in the way."""
        ...


class Scheduler:
    """Runs the jobs of one run."""

    def __init__(self, house: House, watcher: Watcher) -> None:
        self._house = house
        self._watcher = watcher
        self._draining = asyncio.Event()

    @property
    def draining(self) -> bool:
        """Whether no new rollout begins any more."""
        return self._draining.is_set()

    def drain(self) -> None:
        """Begin no new rollout."""
        self._draining.set()

    async def run(self, jobs: Iterable[Job]) -> None:
        """Run them all. Raises the first error that ends a run; cancelled, it leaves no rollout open."""
        queue = iter(jobs)
        async with asyncio.TaskGroup() as group:
            for _ in range(self._house.plan.concurrency):
                group.create_task(self._worker(queue))

    async def _worker(self, queue: Iterator[Job]) -> None:
        for job in queue:
            if self.draining:
                return
            await self._slot(job)

    async def _may_begin(self) -> bool:
        """Wait while the policy server is down; return whether a rollout is to begin."""
        waited = False
        while not self.draining and (problem := await self._house.control.ready()) is not None:
            if not waited:
                logger.warning("no new rollouts until the policy server is back: %s", problem)
            waited = True
            self._watcher.waits(problem)
            await _first_of(self._draining, _READY_EVERY_S)
        if waited:
            self._watcher.waits(None)
        return not self.draining

    async def _slot(self, job: Job) -> None:
        """Run a slot until it has an end that counts, or no more tries."""
        wait_s = _FIRST_WAIT_S
        for tries_left in range(self._house.plan.retries, -1, -1):
            if not await self._may_begin():
                return
            attempt = Attempt(self._house, job)
            self._watcher.begun(job, attempt.rollout_id)
            ended = await attempt.run()
            again = verdict.is_retried(ended.failure) and tries_left > 0 and not self.draining
            self._watcher.ended(job, ended, final=not again)
            if not again:
                return
            assert ended.failure is not None
            logger.info("%s: %s; new attempt in %g s", attempt.rollout_id, ended.failure.message, wait_s)
            await _first_of(self._draining, wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            job = msgspec.structs.replace(job, attempt=job.attempt + 1)


async def _first_of(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
