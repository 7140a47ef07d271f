"""One rollout with real parts, seen from its row."""

import asyncio
import os
import signal

import msgspec
import pytest
from runner_kit import ShellHarness, a_house, a_running_sandbox, attempt, rollout_id, row, with_script

from orchard_proxy.runner.plan import Job, Slot
from orchard_proxy.runner.rollout import Attempt
from orchard_proxy.runner.tasks import AnswerGrade, CommandGrade, Task
from orchard_proxy.schema.enums import Blame, Phase, RolloutStatus
from orchard_proxy.schema.launch import HarnessResult


def task(**fields):
    return Task(**{"task_id": "t", "prompt": "say hello", "timeout_s": 20.0, **fields})


async def test_a_rollout_from_its_files_to_its_reward(house):
    one = task(
        files={"in.txt": "7", "sub/run.sh": "#!/bin/sh\necho ran"},
        setup='test "$(cat in.txt)" = 7 && sub/run.sh > setup.txt',
        env={"FROM_TASK": "yes"},
        grade=CommandGrade(command='test "$(cat out.txt)" = "hello ran yes"'),
        metadata={"source": "test"},
    )
    ended, found = await attempt(house, one, 'echo "$(ask "$PROMPT") $(cat setup.txt) $FROM_TASK" > out.txt; echo fine')
    assert (found.status, found.reward, found.failure) == (RolloutStatus.COMPLETED, 1.0, None)
    assert (found.group_id, found.task_id, found.attempt) == (f"{house.plan.run_id}:t", "t", 1)
    assert (found.harness, {reward.name: reward.value for reward in found.rewards}) == ("shell", {"grade": 1.0})
    assert found.metadata["task"] == {"source": "test"}
    assert (found.metadata["sample"], found.metadata["answer"]) == (0, "fine")
    assert found.metadata["harness_run"]["exit_code"] == 0
    (call,) = await house.control.calls(ended.rollout_id)
    assert (call.outcome, call.http_status) == ("complete", 200)
    told = await house.control.samples(ended.rollout_id)
    assert told["accounting"]["trained"] == told["accounting"]["sampled"] > 0


@pytest.mark.parametrize(
    ("fields", "script", "expected"),
    [
        pytest.param({"grade": CommandGrade(command="false")}, "true", (0.0, None, None), id="graded 0"),
        pytest.param({"grade": None}, "true", (None, None, None), id="not graded"),
        pytest.param({"grade": AnswerGrade(expected="42")}, "ask 'say 42.'", (1.0, None, None), id="right answer"),
        pytest.param({"grade": AnswerGrade(expected="42")}, "ask 'say 43'", (0.0, None, None), id="wrong answer"),
        pytest.param(
            {"grade": CommandGrade(command="echo log; echo 0.25", reward="stdout")},
            "true",
            (0.25, None, None),
            id="stdout",
        ),
        pytest.param(
            {"grade": CommandGrade(command="echo no", reward="stdout")},
            "true",
            (None, "bad_reward", Blame.TASK),
            id="stdout without a number",
        ),
        pytest.param(
            {"grade": CommandGrade(command="sleep 60", timeout_s=0.5)},
            "true",
            (0.0, "grade_timeout", Blame.AGENT),
            id="the grader hangs: not passed",
        ),
        pytest.param(
            {"grade": CommandGrade(command="sleep 60", timeout_s=0.5, reward="stdout")},
            "true",
            (0.0, "grade_timeout", Blame.AGENT),
            id="the grader hangs: no number",
        ),
        pytest.param(
            {"setup": "echo no >&2; exit 3"}, "true", (None, "setup_failed", Blame.TASK), id="the setup fails"
        ),
        pytest.param(
            {"setup": "sleep 60", "setup_timeout_s": 0.5},
            "true",
            (None, "setup_timeout", Blame.TASK),
            id="the setup hangs",
        ),
        pytest.param({"files": {"/usr/x": ""}}, "true", (None, "bad_file", Blame.TASK), id="a file where none may be"),
        pytest.param(
            {"grade": CommandGrade(command="test -f half"), "timeout_s": 1.0},
            "touch half; sleep 60",
            (1.0, "agent_timeout", Blame.AGENT),
            id="too late, and still graded",
        ),
        pytest.param(
            {"grade": CommandGrade(command="true")},
            "exit 3",
            (1.0, "agent_failed", Blame.AGENT),
            id="failed, and still graded",
        ),
        pytest.param(
            {"grade": CommandGrade(command="true")},
            "kill -9 $$",
            (1.0, "agent_killed", Blame.AGENT),
            id="killed, and still graded",
        ),
        pytest.param({"workdir": "/usr/x"}, "true", (None, "bad_path", Blame.TASK), id="a workdir where none may be"),
        pytest.param({}, "exec /no/such/program", (None, "launch_failed", Blame.CLIENT), id="no such program"),
    ],
)
async def test_how_a_rollout_may_end(house, fields, script, expected):
    ended, found = await attempt(house, task(**fields), script)
    failure = found.failure
    assert (found.reward, failure and failure.code, failure and failure.blame) == expected
    assert found.status is (RolloutStatus.FAILED if failure else RolloutStatus.COMPLETED)
    assert ended.reward == found.reward
    assert not house.backend._open


@pytest.mark.parametrize("fields", [{"workdir": "/usr/src/app"}, {"files": {"/opt/x": ""}}], ids=["workdir", "file"])
async def test_a_path_that_needs_a_root_folder_says_so(house, fields):
    _, found = await attempt(house, task(**fields), "true")
    assert "--rootfs" in found.failure.message


async def test_hidden_files_come_when_the_agent_is_dead(house):
    grade = CommandGrade(command="sh hidden/test.sh", files={"hidden/test.sh": "test -f done && test ! -f seen"})
    script = "touch done; test -e hidden && touch seen; true"
    _, found = await attempt(house, task(grade=grade), script)
    assert found.reward == 1.0


async def test_what_the_setup_starts_is_there_for_the_agent_and_dead_for_the_grader(house):
    setup = "(while true; do date +%N > beat; sleep 0.05; done) > /dev/null 2>&1 &"
    check = "rm beat; sleep 0.3; test ! -e beat"
    script = "rm -f beat; sleep 0.5; test -e beat"
    _, found = await attempt(house, task(setup=setup, grade=CommandGrade(command=check)), script)
    assert (found.failure, found.reward) == (None, 1.0)


async def test_text_that_is_no_unicode(house):
    class Odd(ShellHarness):
        def result(self, plan, run, written):
            return HarnessResult(completed=False, answer="a\ud800b\0", detail="\udfff")

    odd = msgspec.structs.replace(house, harness=Odd("printf '\\377'"))
    ended = await Attempt(odd, Job(slot=Slot(task=task(), sample=0))).run()
    found = await row(house, ended.rollout_id)
    assert (found.metadata["answer"], found.failure.message) == ("a?b\0", "?")


async def test_the_key_does_not_get_into_the_row(house):
    _, found = await attempt(house, task(), 'echo "$OPENAI_API_KEY"; echo "$OPENAI_API_KEY" >&2; exit 1')
    told = str(found.metadata) + found.failure.message
    assert "orch-" not in told
    assert "[key]" in told


async def test_a_dead_sandbox_is_a_fault_of_the_infrastructure(house):
    running = asyncio.create_task(attempt(house, task(), "sleep 60"))
    sandbox = await a_running_sandbox(house)
    os.kill(sandbox.pid, signal.SIGKILL)
    _, found = await running
    assert (found.failure.code, found.failure.blame, found.failure.retryable) == ("sandbox_dead", Blame.INFRA, True)
    assert found.reward is None


async def test_a_policy_that_is_down_is_to_blame(tmp_path, policy):
    async with a_house(tmp_path / "data", "http://127.0.0.1:9") as house:
        _, found = await attempt(house, task(grade=CommandGrade(command="true")), "ask hello")
    assert (found.failure.code, found.failure.blame) == ("policy_failed", Blame.POLICY)
    assert found.reward is None, "nothing is said of the agent"


async def test_a_cancelled_rollout_is_aborted_and_its_sandbox_gone(house):
    one = task()
    running = asyncio.create_task(Attempt(with_script(house, "sleep 60"), Job(slot=Slot(task=one, sample=0))).run())
    await a_running_sandbox(house)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    found = await row(house, rollout_id(one, run_id=house.plan.run_id))
    assert (found.status, found.failure.code) == (RolloutStatus.ABORTED, "interrupted")
    assert found.failure.phase in (Phase.LAUNCH, Phase.RUN)
    assert not house.backend._open


async def test_a_bug_of_ours_is_a_row_too(house):
    class Broken:
        name, version = "broken", "1"

        async def install(self):
            """Nothing."""

        def plan(self, request):
            raise ZeroDivisionError("a bug")

    one = task()
    broken = msgspec.structs.replace(house, harness=Broken())
    ended = await Attempt(broken, Job(slot=Slot(task=one, sample=0))).run()
    assert (ended.failure.code, ended.failure.blame) == ("internal_error", Blame.INFRA)
    assert "a bug" in ended.failure.message
