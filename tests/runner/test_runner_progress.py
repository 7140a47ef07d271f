import asyncio
import io

import pytest

from orchard_proxy.runner.plan import Job, Slot
from orchard_proxy.runner.progress import Board
from orchard_proxy.runner.rollout import Ended
from orchard_proxy.runner.tasks import Task
from orchard_proxy.schema.enums import Blame, Phase, RolloutStatus
from orchard_proxy.schema.records import Failure

JOB = Job(slot=Slot(task=Task(task_id="t", prompt="p"), sample=0))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def ended(reward=None, code=None):
    failure = code and Failure(code=code, blame=Blame.AGENT, phase=Phase.RUN)
    return Ended(rollout_id="r", status=RolloutStatus.COMPLETED, reward=reward, failure=failure)


def play(board):
    for _ in range(4):
        board.begun(JOB, "r")
    board.ended(JOB, ended(1.0), final=True)
    board.ended(JOB, ended(0.5, "agent_timeout"), final=True)
    board.ended(JOB, ended(None, "sandbox_dead"), final=False)


async def test_in_a_pipe_there_is_a_line_now_and_then():
    out = io.StringIO()
    async with Board(10, 2, stream=out, every_s=0.05) as board:
        play(board)
        await asyncio.sleep(0.12)
    lines = out.getvalue().splitlines()
    assert len(lines) >= 3
    assert lines[-1].startswith(
        "4/10 rollouts, 1 running, mean reward 0.750, failures: agent_timeout 1, sandbox_dead 1, "
    )
    assert "\x1b" not in out.getvalue()


async def test_on_a_terminal_there_is_a_bar():
    out = Terminal()
    async with Board(10, 2, stream=out) as board:
        play(board)
    assert "4/10" in out.getvalue()
    assert "\x1b" in out.getvalue()


@pytest.mark.parametrize("total", [0, 1])
async def test_nothing_happened(total):
    out = io.StringIO()
    async with Board(total, 0, stream=out):
        pass
    assert out.getvalue() == f"0/{total} rollouts, 0 running, 0 s\n"


def test_it_says_what_it_waits_for():
    board = Board(1, 0)
    board.waits("no answer")
    assert board.line() == "0/1 rollouts, 0 running, waiting for the policy server: no answer, 0 s"
    board.waits(None)
    assert board.line() == "0/1 rollouts, 0 running, 0 s"
