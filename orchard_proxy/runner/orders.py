"""From what a user asked for to the plan of a run: a new one, or the one that is resumed."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from orchard_proxy.errors import UsageError
from orchard_proxy.runner import loading, plan
from orchard_proxy.runner.plan import RunPlan
from orchard_proxy.runner.tasks import Task


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for; None: not said, which takes the default, or what the resumed run had."""

    data_dir: Path
    tasks: Path | None = None
    harness: str | None = None
    harness_args: Mapping[str, str] | None = None
    model: str | None = None
    n: int | None = None
    timeout_s: float | None = None
    rootfs: str | None = None
    retries: int | None = None
    concurrency: int | None = None
    upstream: str | None = None
    proxy: str | None = None
    run_id: str | None = None
    resume: bool = False


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that still lacks what only the harness and the policy server can tell."""

    plan: RunPlan
    tasks: list[Task]
    resumed: RunPlan | None
    """The plan as it was."""


DEFAULTS = {"n": 1, "timeout_s": 1800.0, "retries": 2, "concurrency": 4}
"""Half an hour suits most agents; four sandboxes suit two cores, since agents wait for the policy server."""
_KEPT = ("harness_args", "model", "n", "timeout_s", "rootfs", "retries", "concurrency", "upstream", "proxy")


def draft(orders: Orders) -> Draft:
    """Read the tasks and make the plan. Raises UsageError."""
    if orders.proxy is not None and orders.upstream is not None:
        raise UsageError("give --proxy or --upstream, not both: the proxy that runs already has its policy server")
    return _resumed(orders) if orders.resume else _new(orders)


def _new(orders: Orders) -> Draft:
    if orders.tasks is None or orders.harness is None:
        missing = "TASKS, a JSONL file or a folder" if orders.tasks is None else "--harness NAME"
        raise UsageError(f"say {missing}; or --resume to go on with a run that was stopped")
    run_id = plan.check_run_id(orders.run_id or plan.new_run_id())
    if plan.path_of(orders.data_dir, run_id).exists():
        raise UsageError(f"run {run_id} exists in {orders.data_dir}; add --resume to go on with it")
    tasks = loading.load(orders.tasks)
    made = RunPlan(
        run_id=run_id,
        tasks=str(orders.tasks.absolute()),
        tasks_sha256=loading.digest(tasks),
        harness="",
        harness_version="",
        started_s=time.time(),
        **{"model": "", **DEFAULTS, **_said(orders)},
    )
    return Draft(plan=made, tasks=tasks, resumed=None)


def _resumed(orders: Orders) -> Draft:
    old = plan.load(orders.data_dir, orders.run_id)
    path = orders.tasks or Path(old.tasks)
    tasks = loading.load(path)
    said = _said(orders)
    if "upstream" in said or "proxy" in said:
        said = {"upstream": None, "proxy": None, **said}
    made = msgspec.structs.replace(old, tasks=str(path.absolute()), tasks_sha256=loading.digest(tasks), **said)
    plan.check_same(old, made)
    return Draft(plan=made, tasks=tasks, resumed=old)


def _said(orders: Orders) -> dict[str, Any]:
    said = {name: value for name in _KEPT if (value := getattr(orders, name)) is not None}
    return said if orders.harness is None else {**said, "harness_at": _lasting(orders.harness)}


def _lasting(harness: str) -> str:
    """Make a path absolute, so that it can be resumed from another folder; a name stays a name."""
    is_path = "/" in harness or harness.startswith((".", "~"))
    return str(Path(harness).expanduser().absolute()) if is_path else harness


def settled(made: Draft, *, harness: str, harness_version: str, model: str) -> RunPlan:
    """Complete the plan. Raises UsageError when that makes it another run than the resumed one."""
    done = msgspec.structs.replace(made.plan, harness=harness, harness_version=harness_version, model=model)
    if made.resumed is not None:
        plan.check_same(made.resumed, done)
    return done
