"""Tasks as JSONL: one object a line. Pure; the fields are documented in docs/running.md.

An unknown key is an error with its line, because a misspelt `grade` would otherwise reward nobody.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from orchard_proxy.errors import UsageError
from orchard_proxy.runner import rewards
from orchard_proxy.runner.tasks import AnswerGrade, CommandGrade, Grade, Task

_Seconds = Annotated[float, msgspec.Meta(gt=0)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]


class GradeLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The object `grade`."""

    command: _Text
    timeout_s: _Seconds = 300.0
    reward: Literal["exit", "stdout"] = "exit"
    files: dict[str, str] = {}


class TaskLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line."""

    task_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    prompt: _Text
    files: dict[str, str] = {}
    setup: _Text | None = None
    setup_timeout_s: _Seconds = 300.0
    grade: GradeLine | None = None
    expected_answer: str | int | float | None = None
    answer_match: Literal["exact", "number"] = "exact"
    timeout_s: _Seconds | None = None
    workdir: str | None = None
    rootfs: str | None = None
    env: dict[str, str] = {}
    metadata: dict[str, Any] = {}


_LINE = msgspec.json.Decoder(TaskLine)


def parse(text: bytes, *, name: str, folder: Path) -> list[Task]:
    """Read tasks; a relative `rootfs` is looked for in `folder`. Raises UsageError that names the line."""
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            task = _task(_LINE.decode(line), folder)
            json.loads(line, object_pairs_hook=_without_doubles)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise UsageError(f"{name}, line {number}: {error}") from error
        if task.task_id in seen:
            first = seen[task.task_id]
            raise UsageError(f"{name}, line {number}: task_id {task.task_id!r} is also on line {first}")
        seen[task.task_id] = number
        tasks.append(task)
    return tasks


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object that has a key twice: which one was meant, nobody can tell."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _task(line: TaskLine, folder: Path) -> Task:
    for path in [*line.files, *(line.grade.files if line.grade else ())]:
        _check_path(path)
    if line.workdir is not None and not line.workdir.startswith("/"):
        raise ValueError(f"workdir must begin with /, not {line.workdir!r}")
    return Task(
        task_id=line.task_id,
        prompt=line.prompt,
        files=line.files,
        setup=line.setup,
        setup_timeout_s=line.setup_timeout_s,
        grade=_grade(line),
        timeout_s=line.timeout_s,
        workdir=line.workdir,
        rootfs=None if line.rootfs is None else str((folder / line.rootfs).resolve()),
        env=line.env,
        metadata=line.metadata,
    )


def _check_path(path: str) -> None:
    parts = path.split("/")
    if not path or path.endswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r} is not the path of a file; give one without .. and without a final /")


def _grade(line: TaskLine) -> Grade | None:
    if line.grade is not None and line.expected_answer is not None:
        raise ValueError("give grade or expected_answer, not both")
    if line.expected_answer is not None:
        if line.answer_match == "number" and not rewards.is_number(str(line.expected_answer)):
            raise ValueError(f'answer_match "number" needs a number as expected_answer, not {line.expected_answer!r}')
        return AnswerGrade(expected=str(line.expected_answer), match=line.answer_match)
    if line.grade is None:
        return None
    grade = line.grade
    return CommandGrade(command=grade.command, timeout_s=grade.timeout_s, reward=grade.reward, files=grade.files)
