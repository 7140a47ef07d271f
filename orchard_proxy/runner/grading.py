"""Turns what an agent left in its sandbox into a reward.

Runs when every process of the agent is dead: only then do hidden files and test folders enter the sandbox.
"""

from typing import Any

import msgspec

from orchard_proxy.runner import rewards
from orchard_proxy.runner.rewards import RewardError
from orchard_proxy.runner.tasks import AnswerGrade, CommandGrade, Grade, HarborGrade
from orchard_proxy.schema.enums import Blame, Phase
from orchard_proxy.schema.records import Failure
from orchard_proxy.schema.sandbox import ExecResult, Sandbox, SandboxError

_TAIL_BYTES = 2000
_PREPARE_S = 60.0
_LOGS = "/logs/verifier"
_PREPARE = (
    "chmod -R u+rwX /tests /logs 2>/dev/null; find /tests /logs/verifier -mindepth 1 -delete 2>/dev/null; "
    f"rm -rf {_LOGS}; mkdir -p {_LOGS} /logs/agent /logs/artifacts"
)
"""Empties what the agent could have put where the grader looks. Harbor removes old reward files only."""
_RUN = f"chmod +x /tests/test.sh && (/tests/test.sh) > {_LOGS}/test-stdout.txt 2>&1"


_CLEAN = {"PYTHONNOUSERSITE": "1"}
"""What an agent put into its home as a Python start-up file is not run by the grader's Python."""


class Graded(msgspec.Struct, frozen=True, kw_only=True):
    """What the grader said. `reward` None: nothing that could be a reward."""

    reward: float | None = None
    rewards: dict[str, float] = {}
    failure: Failure | None = None
    detail: dict[str, Any] = {}
    """For a person who asks why."""


async def grade(sandbox: Sandbox, grader: Grade, answer: str | None) -> Graded:
    """Grade. Raises SandboxError when the sandbox fails."""
    match grader:
        case AnswerGrade():
            value = rewards.of_answer(grader, answer)
            return Graded(reward=value, rewards={"answer": value})
        case CommandGrade():
            return await _by_command(sandbox, grader)
        case HarborGrade():
            return await _by_tests(sandbox, grader)


async def _by_command(sandbox: Sandbox, grader: CommandGrade) -> Graded:
    for path, text in grader.files.items():
        await sandbox.write(in_workdir(sandbox, path), text.encode(), mode=mode_of(text))
    run = await sandbox.exec(grader.command, timeout_s=grader.timeout_s, cwd=sandbox.spec.workdir, env=_CLEAN)
    detail = {**_described(run), "output": _tail(run.stdout + run.stderr)}
    if grader.reward == "exit":
        value = float(run.ok)
        failure = _late(grader.timeout_s, Blame.AGENT) if run.timed_out else None
        return Graded(reward=value, rewards={"grade": value}, failure=failure, detail=detail)
    if run.timed_out:
        return Graded(failure=_late(grader.timeout_s, Blame.TASK), detail=detail)
    try:
        value = rewards.of_stdout(run.stdout)
    except RewardError as error:
        return Graded(failure=_unreadable(error), detail=detail)
    return Graded(reward=value, rewards={"grade": value}, detail=detail)


async def _by_tests(sandbox: Sandbox, grader: HarborGrade) -> Graded:
    await sandbox.exec(_PREPARE, timeout_s=_PREPARE_S, cwd="/")
    await sandbox.upload(grader.tests, "/tests")
    run = await sandbox.exec(_RUN, timeout_s=grader.timeout_s, cwd=sandbox.spec.workdir, env=grader.env)
    output = await _read(sandbox, f"{_LOGS}/test-stdout.txt")
    detail = {**_described(run), "output": _tail(output or b"")}
    if run.timed_out:
        return Graded(failure=_late(grader.timeout_s, Blame.TASK), detail=detail)
    try:
        found = rewards.of_files(
            await _read(sandbox, f"{_LOGS}/reward.json"), await _read(sandbox, f"{_LOGS}/reward.txt")
        )
    except RewardError as error:
        return Graded(failure=_unreadable(error), detail=detail)
    return Graded(reward=rewards.main_of(found), rewards=found, detail=detail)


async def _read(sandbox: Sandbox, path: str) -> bytes | None:
    try:
        return await sandbox.read(path)
    except SandboxError as error:
        if error.failure.retryable:
            raise
        return None  # There is none, or it is no file, or far too large: no reward either way.


def in_workdir(sandbox: Sandbox, path: str) -> str:
    """Return an absolute path; a relative one is relative to the workdir."""
    return path if path.startswith("/") else f"{sandbox.spec.workdir.rstrip('/')}/{path}"


def mode_of(text: str) -> int:
    """Return the mode of a file that a task brings as text: a script can be executed."""
    return 0o755 if text.startswith("#!") else 0o644


def _described(run: ExecResult) -> dict[str, Any]:
    told = {"exit_code": run.exit_code, "signal": run.signal, "duration_s": round(run.duration_s, 3)}
    return told | ({"timed_out": True} if run.timed_out else {})


def _tail(output: bytes) -> str:
    return output[-_TAIL_BYTES:].decode(errors="replace")


def _late(timeout_s: float, blame: Blame) -> Failure:
    message = f"the grader was still running after {timeout_s:g} s"
    return Failure(code="grade_timeout", blame=blame, phase=Phase.GRADE, message=message)


def _unreadable(error: RewardError) -> Failure:
    return Failure(code=error.code, blame=Blame.TASK, phase=Phase.GRADE, message=str(error))
