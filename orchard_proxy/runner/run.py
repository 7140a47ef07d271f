"""A run from its plan to its summary. Resuming is the same run: what is done is looked up first.

Not the composition: the proxy, the sandboxes and the harness are given.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from orchard_proxy.errors import OrchardError, UsageError
from orchard_proxy.runner import plan, summary
from orchard_proxy.runner.control import ControlClient, Listed
from orchard_proxy.runner.plan import Slot
from orchard_proxy.runner.progress import Board
from orchard_proxy.runner.rollout import Attempt, House
from orchard_proxy.runner.scheduler import Scheduler
from orchard_proxy.runner.summary import Seen, Summary
from orchard_proxy.runner.tasks import Task
from orchard_proxy.schema.enums import Blame, Phase, RolloutStatus
from orchard_proxy.schema.records import Failure

logger = logging.getLogger(__name__)

READY_S = 60.0
"""A policy server may load its weights for a while; one that is not there should be told of soon."""
_ABREAST = 8
KILLED = Failure(
    code="runner_killed",
    blame=Blame.INFRA,
    phase=Phase.RUN,
    retryable=True,
    message="the runner died while the rollout ran",
)


@contextmanager
def locked(data_dir: Path, run_id: str) -> Iterator[None]:
    """Hold a run. Raises UsageError when another runner does."""
    path = data_dir / "run" / f"{run_id}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"run {run_id} is being worked on by another process, which holds {path}") from error
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


async def wait_until_ready(control: ControlClient) -> None:
    """Wait until the policy server answers. Raises OrchardError."""
    until = time.monotonic() + READY_S
    told = False
    while (problem := await control.ready()) is not None:
        if time.monotonic() > until:
            raise OrchardError(f"the proxy is not ready after {READY_S:g} s: {problem}")
        if not told:
            logger.info("waiting for the policy server: %s", problem)
            told = True
        await asyncio.sleep(0.2)


async def conduct(house: House, tasks: Sequence[Task], stop: "Stop", *, data_dir: Path, export: str) -> Summary:
    """Run what is left of a run, and sum up all of it. The plan is on disk before the first rollout is created."""
    began = time.monotonic()
    slots = plan.slots(tasks, house.plan.n)
    with locked(data_dir, house.plan.run_id):
        plan.save(house.plan, data_dir)
        jobs = await jobs_left(house, slots)
        if house.plan.proxy is not None and jobs:
            await check_model(house, jobs[0], data_dir)
        async with Board(len(slots), len(slots) - len(jobs)) as board:
            scheduler = Scheduler(house, board)
            await stop.watch(scheduler, asyncio.create_task(scheduler.run(jobs), name="rollouts"))
        return await sum_up(house, slots, scheduler, began=began, export=export)


class Stop:
    """Two signals, two steps: the first drains, the second stops. `broken` stops too, and is raised.

    A signal when no rollout runs cancels the task that made this object.
    """

    def __init__(self, broken: "asyncio.Future[None] | None" = None) -> None:
        self._whole = asyncio.current_task()
        self._broken = broken
        self._scheduler: Scheduler | None = None
        self._work: asyncio.Task[None] | None = None

    def signal(self) -> None:
        """Take the next step."""
        if self._scheduler is None or self._work is None:
            if self._whole is not None:
                self._whole.cancel()
        elif self._scheduler.draining:
            logger.warning("stopping now: running rollouts are aborted")
            self._work.cancel()
        else:
            logger.warning("no new rollouts; the running ones may finish. Once more to stop now")
            self._scheduler.drain()

    async def watch(self, scheduler: Scheduler, work: "asyncio.Task[None]") -> None:
        """Wait for the work, or for a reason to stop it."""
        self._scheduler, self._work = scheduler, work
        waited = {work} | ({self._broken} if self._broken is not None else set())
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
            self._work = None
        if self._broken is not None and self._broken.done():
            self._broken.result()


async def check_model(house: House, first: plan.Job, data_dir: Path) -> None:
    """Refuse a model that the policy server of a proxy elsewhere does not list: only a rollout can ask it for them.

    Raises UsageError; what is left of the run is then one aborted rollout.
    """
    attempt = Attempt(house, first)
    listed = await attempt.models()
    if not listed or house.plan.model in listed:
        return
    message = f"--model {house.plan.model}: the policy server has no such model, but {', '.join(listed)}"
    failure = Failure(code="unknown_model", blame=Blame.CLIENT, phase=Phase.CREATE, message=message)
    await house.control.finish(attempt.rollout_id, status=RolloutStatus.ABORTED, failure=failure)
    if first.attempt == 1:
        plan.path_of(data_dir, house.plan.run_id).unlink(missing_ok=True)
    raise UsageError(message)


async def jobs_left(house: House, slots: Sequence[Slot]) -> list[plan.Job]:
    """Return what is to be run, after finishing what a killed runner left open."""
    known = [rollout async for rollout in house.control.rollouts(house.plan.run_id)]
    left = plan.left(house.plan.run_id, slots, known)
    for orphan in left.orphans:
        logger.info("%s was left open by a killed runner: aborted", orphan.rollout_id)
        await house.control.finish(orphan.rollout_id, status=RolloutStatus.ABORTED, failure=KILLED)
    if known:
        logger.info("run %s goes on: %d done, %d to do", house.plan.run_id, left.done, len(left.jobs))
    return left.jobs


async def sum_up(house: House, slots: Sequence[Slot], scheduler: Scheduler, *, began: float, export: str) -> Summary:
    """Read the record of the run and sum it up."""
    rollouts = [rollout async for rollout in house.control.rollouts(house.plan.run_id)]
    gate = asyncio.Semaphore(_ABREAST)

    async def look(rollout: Listed) -> Seen:
        async with gate:
            return Seen(rollout=rollout, calls=await house.control.calls(rollout.rollout_id))

    async with asyncio.TaskGroup() as group:
        looks = [group.create_task(look(rollout)) for rollout in rollouts]
    return summary.build(
        house.plan,
        slots,
        [task.result() for task in looks],
        interrupted=scheduler.draining,
        wall_s=time.monotonic() - began,
        export=export,
    )
