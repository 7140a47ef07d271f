"""What a run is (written to DATA/run before its first rollout), and what is left to do of it. Decisions are pure.

The state of a run is nowhere but in the proxy's record: which rollouts there are, and how they ended. The plan says
only what they should be. Invariant: a sample whose rollout ended without an infrastructure fault is never run again.
"""

import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from orchard_proxy.errors import UsageError
from orchard_proxy.runner.control import Listed
from orchard_proxy.runner.tasks import Task
from orchard_proxy.schema.enums import Blame, RolloutStatus

_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,40}")
_PLAIN = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One run: what must not change when it is resumed, and what may."""

    run_id: str
    tasks: str
    tasks_sha256: str
    harness: str
    harness_at: str = ""
    """What it is found by: its name, or an absolute path."""
    harness_version: str
    harness_args: dict[str, str] = {}
    model: str
    n: int
    timeout_s: float
    rootfs: str | None = None
    retries: int
    concurrency: int
    upstream: str | None = None
    proxy: str | None = None
    started_s: float


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One of the n samples of a task."""

    task: Task
    sample: int
    """From 0."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A slot that is to be run, and the number of its next attempt."""

    slot: Slot
    attempt: int = 1


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of a run."""

    jobs: list[Job]
    orphans: list[Listed]
    """Rollouts whose runner was killed: to be finished as aborted."""
    done: int
    """Slots that need nothing more."""


def slug(task_id: str) -> str:
    """Make a task's id fit into a rollout's: as it is where possible, else shortened, with a hash."""
    if _PLAIN.fullmatch(task_id):
        return task_id
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", task_id)[:48].strip("-")
    return f"{cleaned}-{hashlib.sha256(task_id.encode()).hexdigest()[:10]}"


def group_id(run_id: str, task: Task) -> str:
    """Return the group that the samples of a task share."""
    return f"{run_id}:{slug(task.task_id)}"


def rollout_id(run_id: str, job: Job) -> str:
    """Name an attempt: the same attempt of the same run has the same name, so that creating it is idempotent."""
    return f"{group_id(run_id, job.slot.task)}:{job.slot.sample}-{job.attempt}"


def new_run_id(now_s: float | None = None) -> str:
    """Make up an id that sorts by time."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_s))
    return f"run-{stamp}-{secrets.token_hex(2)}"


def slots(tasks: Sequence[Task], n: int) -> list[Slot]:
    """Return all slots in the order in which they are run."""
    return [Slot(task=task, sample=sample) for task in tasks for sample in range(n)]


def is_infra(rollout: Listed) -> bool:
    """Say whether an ended rollout says nothing of the agent, so that the slot may be run again."""
    return rollout.failure is not None and rollout.failure.blame is Blame.INFRA and rollout.failure.retryable


def left(run_id: str, wanted: Sequence[Slot], known: Iterable[Listed]) -> Left:
    """Compare what should be with what is."""
    by_group: dict[str, list[Listed]] = {}
    for rollout in known:
        by_group.setdefault(rollout.rollout_id.rpartition("-")[0], []).append(rollout)
    jobs: list[Job] = []
    orphans: list[Listed] = []
    for slot in wanted:
        prefix = f"{group_id(run_id, slot.task)}:{slot.sample}"
        there = sorted(by_group.get(prefix, []), key=lambda rollout: rollout.attempt)
        running = [rollout for rollout in there if rollout.status is RolloutStatus.RUNNING]
        orphans += running
        if any(rollout not in running and not is_infra(rollout) for rollout in there):
            continue
        jobs.append(Job(slot=slot, attempt=there[-1].attempt + 1 if there else 1))
    return Left(jobs=jobs, orphans=orphans, done=len(wanted) - len(jobs))


def check_run_id(run_id: str) -> str:
    """Return a run id that may be used. Raises UsageError."""
    if not _RUN_ID.fullmatch(run_id):
        raise UsageError("--run-id takes 1 to 40 of A-Z a-z 0-9 . _ -")
    return run_id


def path_of(data_dir: Path, run_id: str) -> Path:
    """Return where the plan of a run is kept."""
    return data_dir / "run" / f"{run_id}.json"


def save(plan: RunPlan, data_dir: Path) -> None:
    """Write a plan, durably and whole, before anything of the run exists."""
    path = path_of(data_dir, plan.run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    with draft.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def load(data_dir: Path, run_id: str | None) -> RunPlan:
    """Read a plan; of the run that was started last, when no id is given. Raises UsageError."""
    if run_id is not None:
        path = path_of(data_dir, check_run_id(run_id))
        if not path.is_file():
            raise UsageError(f"no run {run_id!r} in {data_dir}: there is no {path}")
        return _read(path)
    plans = [_read(path) for path in (data_dir / "run").glob("*.json")]
    if not plans:
        raise UsageError(f"no run in {data_dir} that could be resumed; give --data, or start one without --resume")
    return max(plans, key=lambda plan: plan.started_s)


def _read(path: Path) -> RunPlan:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunPlan)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is not the plan of a run: {error}") from error


def check_same(old: RunPlan, new: RunPlan) -> None:
    """Refuse to resume a run as another one: its rows would not be samples of the same thing. Raises UsageError."""
    if old.tasks_sha256 != new.tasks_sha256:
        raise UsageError(
            f"the tasks in {new.tasks} are not the ones that run {old.run_id} began with; start a new run for them"
        )
    for name in ("harness", "harness_version", "harness_args", "model", "n", "timeout_s", "rootfs"):
        before, now = getattr(old, name), getattr(new, name)
        if before != now:
            raise UsageError(f"run {old.run_id} has {name} {before!r}, not {now!r}; start a new run for that")
