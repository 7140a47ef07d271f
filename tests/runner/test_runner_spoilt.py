"""An agent that knows it will get a 0.0 and would rather have no reward at all."""

import msgspec
import pytest
from runner_kit import ShellHarness, attempt

from orchard_proxy.runner import grading
from orchard_proxy.runner.plan import Job, Slot
from orchard_proxy.runner.rollout import Attempt
from orchard_proxy.runner.tasks import CommandGrade, HarborGrade, Task
from orchard_proxy.schema.enums import Blame, Phase, RolloutStatus
from orchard_proxy.schema.launch import HarnessError
from orchard_proxy.schema.sandbox import ExecResult, SandboxError, SandboxSpec


class Broken:
    """A sandbox in which one kind of work fails."""

    def __init__(self, fails, error):
        self.spec = SandboxSpec(sandbox_id="s", scratch=["/tests", "/logs"])
        self.fails, self.error = fails, error

    def _maybe(self, name, result=None):
        if name == self.fails:
            raise self.error
        return result

    async def write(self, path, data, *, mode=0o644):
        self._maybe("write")

    async def upload(self, source, target):
        self._maybe("upload")

    async def read(self, path, **_):
        raise SandboxError("no_such_file", path, blame=Blame.AGENT, phase=Phase.RUN, retryable=False)

    async def exec(self, command, **_):
        return self._maybe("run" if command != grading._PREPARE else "prepare", ExecResult(exit_code=0, duration_s=0.1))


def fault(code, blame=Blame.INFRA, *, retryable=False):
    return SandboxError(code, "why", blame=blame, phase=Phase.RUN, retryable=retryable)


OURS = CommandGrade(command="true", files={"g": "1"}, reward="stdout")
HARBOR = HarborGrade(tests="/x")


@pytest.mark.parametrize(
    ("grader", "fails", "error"),
    [
        *((OURS, "write", fault(code)) for code in ("is_a_directory", "file_error", "symlink_loop", "name_too_long")),
        *((OURS, "write", fault(code, Blame.AGENT)) for code in ("not_permitted", "read_only", "disk_full")),
        *((OURS, fails, fault("sandbox_dead", retryable=True)) for fails in ("write", "run")),
        *((OURS, "run", fault(code, Blame.AGENT)) for code in ("shim_killed", "sandbox_oom", "no_resources")),
        *((HARBOR, "upload", fault(code)) for code in ("is_a_directory", "file_error", "symlink_loop")),
        *((HARBOR, fails, fault("sandbox_oom", Blame.AGENT)) for fails in ("prepare", "upload", "run")),
        (HARBOR, "write", fault("disk_full", Blame.AGENT)),
    ],
)
async def test_what_the_agent_did_to_the_sandbox_is_a_zero(grader, fails, error):
    graded = await grading.grade(Broken(fails, error), grader, None)
    failure = graded.failure
    assert (graded.reward, list(graded.rewards.values())) == (0.0, [0.0])
    assert (failure.code, failure.blame, failure.phase) == (error.failure.code, Blame.AGENT, Phase.GRADE)
    assert not failure.retryable


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/usr/x", fault("read_only", Blame.AGENT)),
        ("/proc/x", fault("no_such_file", Blame.AGENT)),
        ("x" * 256, fault("name_too_long")),
        ("x", fault("too_large", Blame.CLIENT)),
        ("x", fault("file_too_large", Blame.AGENT)),
    ],
)
async def test_a_file_that_no_sandbox_could_hold_is_the_tasks(path, error):
    graded = await grading.grade(Broken("write", error), CommandGrade(command="true", files={path: ""}), None)
    assert (graded.reward, graded.failure.code) == (None, "bad_file")
    assert (graded.failure.blame, graded.failure.phase) == (Blame.TASK, Phase.GRADE)


async def test_a_harbor_sandbox_that_died_is_tried_again():
    with pytest.raises(SandboxError):
        await grading.grade(Broken("run", fault("sandbox_dead", retryable=True)), HARBOR, None)


async def test_a_solution_that_kills_its_grader(house):
    task = Task(task_id="k", prompt="p", timeout_s=20.0, grade=CommandGrade(command="sh sol.sh", reward="stdout"))
    _, found = await attempt(
        house, task, "echo 'kill -9 $(cat /proc/$PPID/stat | cut -d\" \" -f4); kill -9 -1' > sol.sh"
    )
    assert found.reward == 0.0 or found.failure.code == "no_reward", found.failure
    assert found.failure.phase is Phase.GRADE


async def test_a_result_that_nobody_can_read_is_graded(house):
    class Odd(ShellHarness):
        def result(self, plan, run, written):
            raise HarnessError("bad_result", "deep", blame=Blame.AGENT, phase=Phase.RUN)

    task = Task(task_id="t", prompt="p", timeout_s=20.0, grade=CommandGrade(command="test -f done"))
    ended = await Attempt(
        msgspec.structs.replace(house, harness=Odd("touch done")), Job(slot=Slot(task=task, sample=0))
    ).run()
    assert (ended.reward, ended.status) == (1.0, RolloutStatus.FAILED)
    assert (ended.failure.code, ended.failure.blame) == ("bad_result", Blame.AGENT)
