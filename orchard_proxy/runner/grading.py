"""Turns what an agent left in its sandbox into a reward.

Runs when every process of the agent is dead: only then do hidden files and test folders enter the sandbox.
"""

import posixpath
from collections.abc import Iterable
from typing import Any

import msgspec

from orchard_proxy.runner import rewards
from orchard_proxy.runner.rewards import RewardError
from orchard_proxy.runner.tasks import AnswerGrade, CommandGrade, Grade, HarborGrade
from orchard_proxy.schema.enums import Blame, Phase
from orchard_proxy.schema.records import Failure
from orchard_proxy.schema.sandbox import ExecResult, Sandbox, SandboxError, SandboxSpec

_TAIL_BYTES = 2000
_PREPARE_S = 60.0
_LOGS = "/logs/verifier"
_PREPARE = (
    "chmod -R u+rwX /tests /logs 2>/dev/null; find /tests /logs/verifier -mindepth 1 -delete 2>/dev/null; "
    f'rm -rf {_LOGS}; mkdir -p {_LOGS} /logs/agent /logs/artifacts && test -z "$(ls -A /tests)"'
)
"""Empties what the agent could have put where the grader looks, or fails. Harbor removes old reward files only."""
_RUN = f"chmod +x /tests/test.sh && (/tests/test.sh) > {_LOGS}/test-stdout.txt 2>&1"
_GRADE = "grade"
_PROBE_BYTES = 4096
_NO_FILES = ("/proc", "/sys", "/dev")
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
_CLEAN = {"PYTHONNOUSERSITE": "1"}
"""What an agent put into its home as a Python start-up file is not run by the grader's Python."""


class Graded(msgspec.Struct, frozen=True, kw_only=True):
    """What the grader said. `reward` None: nothing that could be a reward."""

    reward: float | None = None
    rewards: dict[str, float] = {}
    failure: Failure | None = None
    detail: dict[str, Any] = {}
    """For a person who asks why."""


class _Over(Exception):  # noqa: N818 (an end, not an error)
    """Grading has ended early, as `graded` says."""

    def __init__(self, graded: Graded) -> None:
        super().__init__()
        self.graded = graded


async def grade(sandbox: Sandbox, grader: Grade, answer: str | None) -> Graded:
    """Grade. What the agent did to its sandbox, so that it cannot be graded, is a 0.0 and the agent's failure.

    Raises SandboxError when the sandbox fails otherwise.
    """
    try:
        match grader:
            case AnswerGrade():
                value = rewards.of_answer(grader, answer)
                return Graded(reward=value, rewards={"answer": value})
            case CommandGrade():
                return await _by_command(sandbox, grader)
            case HarborGrade():
                return await _by_tests(sandbox, grader)
    except _Over as over:
        return over.graded


async def _by_command(sandbox: Sandbox, grader: CommandGrade) -> Graded:
    await _bring(sandbox, grader)
    try:
        run = await sandbox.exec(grader.command, timeout_s=grader.timeout_s, cwd=sandbox.spec.workdir, env=_CLEAN)
    except SandboxError as error:
        raise _spoilt(error, "the grade command could not be run to its end", _GRADE) from error
    detail = {**_described(run), "output": _tail(run.stdout + run.stderr)}
    if run.timed_out:
        return _zero(_late(grader.timeout_s, Blame.AGENT), _GRADE, detail)
    try:
        value = float(run.ok) if grader.reward == "exit" else rewards.of_stdout(run.stdout)
    except RewardError as error:
        if run.oom:
            return _zero(_failure("sandbox_oom", Blame.AGENT, f"out of memory: {error}"), _GRADE, detail)
        return Graded(failure=_unreadable(error), detail=detail)
    return Graded(reward=value, rewards={_GRADE: value}, detail=detail)


async def _bring(sandbox: Sandbox, grader: CommandGrade) -> None:
    for path, text in grader.files.items():
        target = in_workdir(sandbox, path)
        try:
            await sandbox.write(target, text.encode(), mode=mode_of(text))
        except SandboxError as error:
            if _is_tasks(error) or not _may_hold(sandbox.spec, target):
                raise _Over(Graded(failure=_failure("bad_file", Blame.TASK, str(error)))) from error
            raise _spoilt(error, f"{path} could not be written", _GRADE) from error


async def _by_tests(sandbox: Sandbox, grader: HarborGrade) -> Graded:
    await _bring_tests(sandbox, grader)
    run = await _tested(sandbox, grader)
    output = await _read(sandbox, f"{_LOGS}/test-stdout.txt")
    detail = {**_described(run), "output": _tail(output or b"")}
    if run.timed_out:
        return Graded(failure=_late(grader.timeout_s, Blame.TASK), detail=detail)
    try:
        found = rewards.of_files(
            await _read(sandbox, f"{_LOGS}/reward.json"), await _read(sandbox, f"{_LOGS}/reward.txt")
        )
    except RewardError as error:
        await _check_room(sandbox, detail)
        return Graded(failure=_unreadable(error), detail=detail)
    return Graded(reward=rewards.main_of(found), rewards=found, detail=detail)


async def _bring_tests(sandbox: Sandbox, grader: HarborGrade) -> None:
    """Empty the folders of the grader and bring its files."""
    try:
        run = await sandbox.exec(_PREPARE, timeout_s=_PREPARE_S, cwd="/")
        if not run.ok:
            message = f"/tests and /logs could not be emptied: {_tail(run.stderr).strip() or _described(run)}"
            raise _Over(_zero(_failure("tests_blocked", Blame.AGENT, message), rewards.MAIN, _described(run)))
        await sandbox.upload(grader.tests, "/tests")
    except SandboxError as error:
        if error.failure.retryable:
            raise
        if _is_tasks(error):
            raise _Over(Graded(failure=_failure("bad_file", Blame.TASK, str(error)))) from error
        raise _spoilt(error, "the tests could not be brought in", rewards.MAIN) from error


async def _tested(sandbox: Sandbox, grader: HarborGrade) -> ExecResult:
    try:
        return await sandbox.exec(_RUN, timeout_s=grader.timeout_s, cwd=sandbox.spec.workdir, env=grader.env)
    except SandboxError as error:
        if error.failure.retryable:
            raise
        if error.failure.code == "shim_killed":
            raise _Over(Graded(failure=_failure("shim_killed", Blame.TASK, f"test.sh: {error}"))) from error
        raise _spoilt(error, "test.sh could not be run to its end", rewards.MAIN) from error


async def _check_room(sandbox: Sandbox, detail: dict[str, Any]) -> None:
    """Look whether there was room for a reward at all; an agent may have filled the sandbox."""
    try:
        await sandbox.write(f"{_LOGS}/.room", b"x" * _PROBE_BYTES)
    except SandboxError as error:
        if error.failure.code in _FULL:
            raise _spoilt(error, "test.sh had no room for a reward", rewards.MAIN, detail) from error


_FULL = frozenset({"disk_full", "no_resources", "sandbox_oom"})
_TASKS = frozenset({"file_too_large"})
"""Codes of writing a file that say something of the file, not of where it goes."""


def _is_tasks(error: SandboxError) -> bool:
    return error.failure.blame is Blame.CLIENT or error.failure.code in _TASKS


def _may_hold(spec: SandboxSpec, path: str) -> bool:
    """Say whether a file can be at a path of a new sandbox; where not, the task is wrong."""
    if len(path.encode()) > _LONGEST_PATH or any(len(part.encode()) > _LONGEST_NAME for part in path.split("/")):
        return False
    if _is_below(path, [*_NO_FILES, *(mount.target for mount in spec.mounts)]):
        return False
    return spec.rootfs is not None or _is_below(path, [spec.workdir, spec.home, "/tmp", *spec.scratch])  # noqa: S108


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(posixpath.normpath(path).startswith(f"{folder.rstrip('/')}/") for folder in folders)


def _spoilt(error: SandboxError, what: str, name: str, detail: dict[str, Any] | None = None) -> _Over:
    return _Over(_zero(_failure(error.failure.code, Blame.AGENT, f"{what}: {error}"), name, detail or {}))


def _zero(failure: Failure, name: str, detail: dict[str, Any]) -> Graded:
    return Graded(reward=0.0, rewards={name: 0.0}, failure=failure, detail=detail)


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
    return _failure("grade_timeout", blame, message)


def _unreadable(error: RewardError) -> Failure:
    return _failure(error.code, Blame.TASK, str(error))


def _failure(code: str, blame: Blame, message: str) -> Failure:
    return Failure(code=code, blame=blame, phase=Phase.GRADE, message=message)
