"""What a task is, whatever file it came from. Not the formats: `jsonl` and `harbor` read those.

Invariant: nothing that grades (commands, hidden files, the expected answer) is in a field that is put into the sandbox
before the agent is dead.
"""

from typing import Any, Literal

import msgspec


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """A host file or folder that is copied into the sandbox before the agent starts."""

    source: str
    target: str


class CommandGrade(msgspec.Struct, frozen=True, kw_only=True, tag="command"):
    """A command, run when the agent is dead."""

    command: str
    timeout_s: float = 300.0
    reward: Literal["exit", "stdout"] = "exit"
    """`exit`: status 0 is 1.0, anything else 0.0. `stdout`: the last line that is not blank is the reward."""
    files: dict[str, str] = {}
    """Hidden files, written just before the command runs."""


class AnswerGrade(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """The harness' final answer, compared outside the sandbox."""

    expected: str
    match: Literal["exact", "number"] = "exact"
    """`exact`: equal once both are normalised. `number`: the last number in the answer equals the expected one."""


class HarborGrade(msgspec.Struct, frozen=True, kw_only=True, tag="harbor"):
    """A folder of tests, copied to /tests when the agent is dead; test.sh writes /logs/verifier/reward.{json,txt}."""

    tests: str
    timeout_s: float = 600.0
    env: dict[str, str] = {}


Grade = CommandGrade | AnswerGrade | HarborGrade


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task."""

    task_id: str
    prompt: str
    files: dict[str, str] = {}
    """Path (relative: to workdir) → text, written before setup."""
    uploads: list[Upload] = []
    setup: str | None = None
    """Command run before the agent; it must exit with 0."""
    setup_timeout_s: float = 300.0
    grade: Grade | None = None
    """None: the rollout gets no reward."""
    timeout_s: float | None = None
    """For the agent; None: what the run says."""
    workdir: str | None = None
    rootfs: str | None = None
    env: dict[str, str] = {}
    memory_bytes: int | None = None
    scratch: list[str] = []
    metadata: dict[str, Any] = {}
    warnings: list[str] = []
    """What of the task could not be honoured; shown at the start and kept in each row."""
