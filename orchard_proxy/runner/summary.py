"""What came out of a run, computed from the proxy's record of it, so that a resumed run is summed up whole.

The attempt that counts for a sample is its last one; earlier ones ended by a fault of the infrastructure.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from orchard_proxy.runner import passk
from orchard_proxy.runner.control import Listed, ListedCall
from orchard_proxy.runner.plan import RunPlan, Slot, group_id, is_infra
from orchard_proxy.runner.rewards import mean
from orchard_proxy.schema.enums import Blame, RolloutStatus

PASSED = 1.0 - 1e-9
"""A rollout passed when its reward reaches 1."""


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over some samples."""

    n: int
    """Samples that were wanted."""
    finished: int
    graded: int
    passed: int
    reward_mean: float | None
    pass_at_k: dict[str, float]
    failures: dict[str, int]
    """By code, of the attempts that count."""
    attempts: int
    prompt_tokens: int
    sampled_tokens: int
    duration_s_mean: float | None


class TaskSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One task."""

    task_id: str
    rewards: list[float | None]
    """By sample; None: no reward."""
    rollout_ids: list[str | None]
    totals: Totals


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run."""

    run_id: str
    harness: str
    harness_version: str
    model: str
    n: int
    tasks: list[TaskSummary]
    total: Totals
    interrupted: bool
    left: int
    """Samples that `--resume` would run."""
    wall_s: float
    export: str
    """The command that exports what was recorded."""

    @property
    def ok(self) -> bool:
        """Whether every sample came to an end that nobody but the agent is to blame for."""
        return self.total.finished == self.total.n


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout with its calls."""

    rollout: Listed
    calls: list[ListedCall] = []


def build(
    plan: RunPlan, slots: Sequence[Slot], seen: Sequence[Seen], *, interrupted: bool, wall_s: float, export: str
) -> Summary:
    """Sum up a run."""
    by_sample = _by_sample(seen)
    tasks = []
    for task in {slot.task.task_id: slot.task for slot in slots}.values():
        samples = [by_sample.get((group_id(plan.run_id, task), sample), []) for sample in range(plan.n)]
        tasks.append(_task(task.task_id, samples))
    every = [by_sample.get((group_id(plan.run_id, slot.task), slot.sample), []) for slot in slots]
    total = _totals(every, [(task.totals.graded, task.totals.passed) for task in tasks], plan.n)
    return Summary(
        run_id=plan.run_id,
        harness=plan.harness,
        harness_version=plan.harness_version,
        model=plan.model,
        n=plan.n,
        tasks=tasks,
        total=total,
        interrupted=interrupted,
        left=sum(_is_left(attempts) for attempts in every),
        wall_s=round(wall_s, 3),
        export=export,
    )


def _by_sample(seen: Sequence[Seen]) -> Mapping[tuple[str, int], list[Seen]]:
    """Group attempts by (group, sample), the last one at the end."""
    found: dict[tuple[str, int], list[Seen]] = {}
    for one in sorted(seen, key=lambda one: one.rollout.attempt):
        group, _, tail = one.rollout.rollout_id.rpartition(":")
        found.setdefault((group, int(tail.partition("-")[0])), []).append(one)
    return found


def _task(task_id: str, samples: Sequence[list[Seen]]) -> TaskSummary:
    last = [attempts[-1].rollout if attempts else None for attempts in samples]
    graded = [one.reward for one in last if one is not None and one.reward is not None]
    counts = [(len(graded), sum(reward >= PASSED for reward in graded))]
    return TaskSummary(
        task_id=task_id,
        rewards=[None if one is None else one.reward for one in last],
        rollout_ids=[None if one is None else one.rollout_id for one in last],
        totals=_totals(samples, counts, len(samples)),
    )


def _totals(samples: Sequence[list[Seen]], counts: Sequence[tuple[int, int]], n: int) -> Totals:
    last = [attempts[-1].rollout for attempts in samples if attempts]
    rewards = [one.reward for one in last if one.reward is not None]
    calls = [call for attempts in samples for one in attempts for call in one.calls]
    durations = [one.finished_s - one.started_s for one in last if one.finished_s is not None]
    at_k = {str(k): passk.mean_pass_at_k(counts, k) for k in passk.ks(n)}
    return Totals(
        n=len(samples),
        finished=sum(_is_finished(one) for one in last),
        graded=len(rewards),
        passed=sum(passed for _, passed in counts),
        reward_mean=mean(rewards) if rewards else None,
        pass_at_k={k: value for k, value in at_k.items() if value is not None},
        failures=dict(Counter(one.failure.code for one in last if one.failure is not None).most_common()),
        attempts=sum(map(len, samples)),
        prompt_tokens=sum(call.prompt_tokens or 0 for call in calls),
        sampled_tokens=sum(sum(call.sampled_tokens) for call in calls),
        duration_s_mean=round(statistics.fmean(durations), 3) if durations else None,
    )


def _is_left(attempts: Sequence[Seen]) -> bool:
    last = attempts[-1].rollout if attempts else None
    return last is None or last.status is RolloutStatus.RUNNING or is_infra(last)


def _is_finished(one: Listed) -> bool:
    """Say whether a sample came to an end that says something of the agent."""
    blamed_elsewhere = one.failure is not None and one.failure.blame is not Blame.AGENT
    return one.status in (RolloutStatus.COMPLETED, RolloutStatus.FAILED) and not blamed_elsewhere


def as_json(summary: Summary) -> str:
    """Render for `--json`."""
    told: dict[str, Any] = {"ok": summary.ok, **msgspec.to_builtins(summary)}
    return msgspec.json.encode(told).decode()
