"""The table of `make demo`: one row a task, from the Parquet files alone."""

from collections import defaultdict
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import fmean

import pyarrow.parquet as pq
from rich.table import Table


@dataclass
class Row:
    """What came of one task, all attempts together.

    `masked` are sampled tokens that no sample trains. `reward` is the mean of the attempts that were graded; one that
    the infrastructure failed is not, and was repeated.
    """

    task: str
    harness: str
    rollouts: int
    calls: int
    sampled: int
    trained: int
    masked: int
    branches: int
    reward: float


def read(export: Path) -> list[Row]:
    """Return the rows of an export, tasks in the order in which they were first run."""
    by_task = defaultdict(list)
    for rollout in pq.read_table(export / "rollouts").sort_by("started_at").to_pylist():
        by_task[rollout["task_id"]].append(rollout)
    samples = pq.read_table(export / "samples", columns=["rollout_id", "loss_mask"]).to_pylist()
    return [_row(task, rollouts, samples) for task, rollouts in by_task.items()]


def _row(task: str, rollouts: list[dict], samples: list[dict]) -> Row:
    ids = {rollout["rollout_id"] for rollout in rollouts}
    masks = [sample["loss_mask"] for sample in samples if sample["rollout_id"] in ids]
    rewards = [rollout["reward"] for rollout in rollouts if rollout["reward"] is not None]
    sampled, trained = sum(rollout["sampled_tokens"] for rollout in rollouts), sum(map(sum, masks))
    return Row(
        task=task,
        harness=rollouts[0]["harness"],
        rollouts=len(rollouts),
        calls=sum(rollout["calls"] for rollout in rollouts),
        sampled=sampled,
        trained=trained,
        masked=sampled - trained,
        branches=len(masks),
        reward=fmean(rewards) if rewards else 0.0,
    )


def render(rows: list[Row]) -> Table:
    """Return the table, with sums."""
    table = Table()
    for at, field in enumerate(fields(Row)):
        table.add_column(field.name, justify="left" if at < 2 else "right")
    for row in rows:
        table.add_row(*map(_cell, astuple(row)))
    table.add_section()
    sums = [sum(column) for column in zip(*(astuple(row)[2:-1] for row in rows), strict=True)]
    reward = sum(row.reward * row.rollouts for row in rows) / max(sums[0], 1)
    table.add_row("all", "", *map(_cell, [*sums, reward]), style="bold")
    return table


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
