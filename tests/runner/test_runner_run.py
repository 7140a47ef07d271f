"""Whole runs with real parts: order, concurrency, retries, stopping, resuming."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import msgspec
import pytest
from fakes.flaky import FlakyBackend
from runner_kit import Served, ShellHarness, a_house, a_running_sandbox, rollout_id, with_script

from orchard_proxy.errors import UsageError
from orchard_proxy.runner import plan, run
from orchard_proxy.runner.control import ControlClient, ProxyLostError
from orchard_proxy.runner.run import Stop
from orchard_proxy.runner.tasks import CommandGrade, Task
from orchard_proxy.schema.enums import Blame, RolloutStatus

PASS = CommandGrade(command="true")
TASKS = [Task(task_id=name, prompt="p", timeout_s=30.0, grade=PASS) for name in ("c", "a", "b")]


async def conduct(house, tasks, tmp_path, stop=None):
    return await run.conduct(house, tasks, stop or Stop(), data_dir=tmp_path, export="orchard export")


def planned(house, **fields):
    return msgspec.structs.replace(house, plan=msgspec.structs.replace(house.plan, **fields))


@asynccontextmanager
async def flaky(house, *broken, **kwargs):
    backend = FlakyBackend(*broken, **kwargs)
    try:
        yield msgspec.structs.replace(house, backend=backend)
    finally:
        await backend.close()


async def rows(house):
    return [rollout async for rollout in house.control.rollouts(house.plan.run_id)]


def most_at_once(found):
    edges = [(one.started_s, 1) for one in found] + [(one.finished_s, -1) for one in found]
    level = most = 0
    for _, step in sorted(edges):
        level += step
        most = max(most, level)
    return most


async def test_every_task_n_times_in_order_and_not_too_many_at_once(house, tmp_path):
    house = planned(with_script(house, "sleep 0.3"), n=3, concurrency=3)
    told = await conduct(house, TASKS, tmp_path)
    assert (told.ok, told.total.n, told.total.passed, told.total.attempts) == (True, 9, 9, 9)
    assert told.total.pass_at_k == {"1": 1.0, "2": 1.0, "3": 1.0}
    found = await rows(house)
    wanted = [rollout_id(task, sample=sample, run_id=house.plan.run_id) for task in TASKS for sample in range(3)]
    assert sorted(one.rollout_id for one in found) == sorted(wanted)
    begun = [wanted.index(one.rollout_id) for one in found]
    assert all(abs(at - place) < 3 for place, at in enumerate(begun)), "in order, as far as three at once can be"
    assert most_at_once(found) == 3
    assert {one.group_id for one in found if one.task_id == "a"} == {f"{house.plan.run_id}:a"}
    assert plan.load(tmp_path, house.plan.run_id) == house.plan


async def test_infrastructure_faults_are_new_attempts(house, tmp_path):
    async with flaky(with_script(house, "true"), ":a:0-1", ":a:0-2") as broken:
        told = await conduct(broken, TASKS, tmp_path)
        assert (told.ok, told.total.passed, told.total.attempts) == (True, 3, 5)
        attempts = [one for one in await rows(broken) if one.task_id == "a"]
        assert [(one.attempt, one.failure and one.failure.code) for one in attempts] == [
            (1, "flaky"),
            (2, "flaky"),
            (3, None),
        ]
        assert {one.group_id for one in attempts} == {f"{house.plan.run_id}:a"}


async def test_retries_end_and_resuming_gives_new_ones(house, tmp_path):
    house = planned(with_script(house, "true"), retries=1)
    async with flaky(house, ":a:0-1", ":a:0-2", ":a:0-3") as broken:
        told = await conduct(broken, TASKS, tmp_path)
        assert (told.ok, told.total.finished, told.total.failures) == (False, 2, {"flaky": 1})
        told = await conduct(broken, TASKS, tmp_path)
        assert (told.ok, told.total.attempts) == (True, 6)
        before = await rows(broken)
        told = await conduct(broken, TASKS, tmp_path)
        assert (told.ok, await rows(broken)) == (True, before), "nothing was left to do"


async def test_a_fault_that_no_retry_mends_is_tried_once(house, tmp_path):
    async with flaky(with_script(house, "true"), ":a:0-1", retryable=False) as broken:
        told = await conduct(broken, TASKS, tmp_path)
        assert (told.ok, told.total.attempts, told.total.failures) == (False, 3, {"flaky": 1})


async def test_the_agents_own_faults_are_not_tried_again(house, tmp_path):
    told = await conduct(with_script(house, "exit 1"), TASKS, tmp_path)
    assert (told.ok, told.total.attempts, told.total.failures) == (True, 3, {"agent_failed": 3})


async def begin(house, tasks, tmp_path):
    """Start a run; give its task and its Stop, once two rollouts run."""
    made: asyncio.Future[Stop] = asyncio.get_running_loop().create_future()

    async def work():
        made.set_result(Stop())
        return await conduct(house, tasks, tmp_path, made.result())

    task = asyncio.create_task(work())
    stop = await made
    async with asyncio.timeout(20):
        while len(house.backend._open) < 2:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.5)
    return task, stop


async def test_the_first_signal_drains(house, tmp_path):
    house = planned(with_script(house, "sleep 1.5"), n=2, concurrency=2)
    task, stop = await begin(house, TASKS, tmp_path)
    stop.signal()
    told = await task
    assert (told.ok, told.interrupted, told.total.finished, told.total.failures) == (False, True, 2, {})
    found = await rows(house)
    assert [one.status for one in found] == [RolloutStatus.COMPLETED] * 2, "no new one began, the running ones ended"
    told = await conduct(planned(with_script(house, "true"), concurrency=4), TASKS, tmp_path)
    assert (told.ok, told.total.finished, told.total.attempts) == (True, 6, 6)
    assert (await rows(house))[:2] == found, "and they were not run again"


async def test_the_second_signal_stops(house, tmp_path):
    house = planned(with_script(house, "sleep 30"), n=2, concurrency=2)
    task, stop = await begin(house, TASKS, tmp_path)
    stop.signal()
    stop.signal()
    async with asyncio.timeout(10):
        told = await task
    assert (told.ok, told.total.finished, told.total.failures) == (False, 0, {"interrupted": 2})
    assert [(one.status, one.reward) for one in await rows(house)] == [(RolloutStatus.ABORTED, None)] * 2
    assert not house.backend._open
    told = await conduct(planned(with_script(house, "true"), concurrency=4), TASKS, tmp_path)
    assert (told.ok, told.total.finished, told.total.attempts) == (True, 6, 8)


async def test_what_a_killed_runner_left_open_is_aborted_and_run_again(house, tmp_path):
    left = rollout_id(TASKS[1], run_id=house.plan.run_id)
    await house.control.create(left, run_id=house.plan.run_id, task_id="a", attempt=1)
    told = await conduct(with_script(house, "true"), TASKS, tmp_path)
    assert (told.ok, told.total.finished, told.total.attempts) == (True, 3, 4)
    by_id = {one.rollout_id: one for one in await rows(house)}
    assert (by_id[left].status, by_id[left].failure.code) == (RolloutStatus.ABORTED, "runner_killed")
    assert by_id[rollout_id(TASKS[1], number=2, run_id=house.plan.run_id)].status is RolloutStatus.COMPLETED


async def test_one_run_has_one_runner(house, tmp_path):
    with run.locked(tmp_path, house.plan.run_id):
        with pytest.raises(UsageError, match="another process"):
            await conduct(with_script(house, "true"), TASKS, tmp_path)


async def test_a_proxy_that_is_gone_for_good_ends_the_run(house, tmp_path):
    """The rollouts that could not be finished are found by the next resume."""
    gone = Served(house.proxy.url, house.proxy.admin_key, house.proxy.socket)
    async with ControlClient(lambda: gone.url, gone.admin_key, patience_s=0.5) as control:
        broken = msgspec.structs.replace(house, control=control, proxy=gone, harness=ShellHarness("sleep 1.5"))
        task, _ = await begin(broken, TASKS, tmp_path)
        gone.url = "http://127.0.0.1:9"
        with pytest.raises(BaseExceptionGroup) as caught:
            async with asyncio.timeout(30):
                await task
    assert caught.group_contains(ProxyLostError)
    assert not house.backend._open
    told = await conduct(with_script(house, "true"), TASKS, tmp_path)
    assert (told.ok, told.total.finished) == (True, 3)


async def test_a_rollout_that_failed_while_the_proxy_was_down_is_tried_again(policy, tmp_path):
    """And then judged like any other: the same failure, without a dead proxy, is the agent's."""
    async with a_house(tmp_path / "data", policy) as house:
        broken = with_script(house, "ask 'say a' || exit 2; sleep 2; exit 1")
        work = asyncio.create_task(conduct(broken, TASKS[:1], tmp_path))
        await a_running_sandbox(broken)
        os.kill(house.proxy.pid, signal.SIGKILL)
        told = await work
        assert (told.ok, told.total.attempts, told.total.failures) == (True, 2, {"agent_failed": 1})
        first, second = await rows(house)
        assert (first.failure.code, first.failure.blame, first.reward) == ("proxy_restarted", Blame.INFRA, None)
        assert (second.failure.code, second.reward) == ("agent_failed", 1.0)


async def test_the_policy_server_is_waited_for_at_the_start(house):
    await run.wait_until_ready(house.control)


class Engine:
    """The control plane of a proxy whose policy server is down now and then."""

    def __init__(self, control):
        self._control = control
        self.problem = None

    def __getattr__(self, name):
        return getattr(self._control, name)

    async def ready(self):
        return self.problem


async def test_no_rollout_begins_while_the_policy_server_is_down(house, tmp_path):
    engine = Engine(house.control)
    house = planned(with_script(house, "sleep 0.5"), concurrency=1)
    house = msgspec.structs.replace(house, control=engine)
    running = asyncio.create_task(conduct(house, TASKS, tmp_path))
    await a_running_sandbox(house)
    engine.problem = "down"
    await asyncio.sleep(1.5)
    before = len(await rows(house))
    await asyncio.sleep(1.5)
    assert len(await rows(house)) == before < 3
    engine.problem = None
    told = await running
    assert (told.ok, told.total.attempts) == (True, 3)


async def test_a_run_that_waits_for_the_policy_server_can_be_stopped(house, tmp_path):
    engine = Engine(house.control)
    engine.problem = "down"
    stop = Stop()
    house = msgspec.structs.replace(with_script(house, "true"), control=engine)
    running = asyncio.create_task(conduct(house, TASKS, tmp_path, stop))
    await asyncio.sleep(1.0)
    stop.signal()
    told = await asyncio.wait_for(running, 5)
    assert (told.interrupted, told.left, told.total.attempts) == (True, 3, 0)
