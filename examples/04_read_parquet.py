"""Read an export: DuckDB for questions, PyArrow for the rows, torch for a batch to train on.

    orchard export --out out
    python examples/04_read_parquet.py out       # pip install duckdb torch to see all of it

An export is plain Parquet: nothing here imports Orchard. What the columns mean: docs/columns.md.
"""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq


def main(out: Path) -> None:
    if not (out / "samples").is_dir():
        sys.exit(f"{out} is not an export. Make one: orchard export --out {out}")
    try:
        ask(out)
    except ModuleNotFoundError:
        print("No DuckDB here. For SQL: pip install duckdb")
    rows = training_rows(out)
    print(f"{len(rows)} rows to train on")
    try:
        batches = load(rows, size=4)
    except ModuleNotFoundError:
        print("No torch here. For tensors: pip install torch. As numpy arrays, the first batch is:")
        batches = [pad(rows[:4])] if rows else []
    for name, array in next(iter(batches), {}).items():
        print(f"  {name:14}  {array.dtype!s:13}  {list(array.shape)}")


def ask(out: Path) -> None:
    """Ask in SQL: how did each task go, and what is there to train on?"""
    import duckdb  # noqa: PLC0415 (may be missing)

    for table in ("rollouts", "samples"):
        duckdb.from_parquet(f"{out}/{table}/*.parquet").create_view(table)
    duckdb.sql("SELECT task_id, count(*) AS rollouts, avg(reward) AS reward FROM rollouts GROUP BY ALL").show()
    duckdb.sql("SELECT branch_reason, sum(list_sum(loss_mask)) AS targets FROM samples GROUP BY ALL").show()


def load(rows: list[dict], *, size: int):
    """Return a DataLoader of batches: dicts of tensors, as `pad` makes them."""
    import torch  # noqa: PLC0415 (may be missing)

    def collate(some: list[dict]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array) for name, array in pad(some).items()}

    return torch.utils.data.DataLoader(rows, batch_size=size, collate_fn=collate)


def training_rows(out: Path) -> list[dict]:
    """Return the samples that teach something, each with the advantage of its rollout."""
    rows = pq.read_table(out / "samples", columns=["rollout_id", "token_ids", "loss_mask", "logprobs"]).to_pylist()
    advantages = group_advantages(out)
    graded = [row for row in rows if row["rollout_id"] in advantages and any(row["loss_mask"])]
    return [{**row, "advantage": advantages[row["rollout_id"]]} for row in graded]


def group_advantages(out: Path) -> dict[str, float]:
    """Return the advantage of each rollout as in GRPO: its reward against its group's mean, in standard deviations.

    A rollout without a reward has none, and does not count in its group. A group that agrees teaches nothing: 0.
    """
    groups = defaultdict(dict)
    for row in pq.read_table(out / "rollouts", columns=["rollout_id", "group_id", "reward"]).to_pylist():
        if row["reward"] is not None:
            groups[row["group_id"] or row["rollout_id"]][row["rollout_id"]] = row["reward"]
    advantages = {}
    for rewards in groups.values():
        values = np.array(list(rewards.values()))
        spread = values.std() if np.ptp(values) else np.inf  # equal floats can have a deviation of 1e-17
        advantages.update(zip(rewards, (values - values.mean()) / spread, strict=True))
    return advantages


def pad(rows: list[dict]) -> dict[str, np.ndarray]:
    """Make arrays of shape [rows, longest row]; what stands at position t is about the token at t.

    `logprobs` are the sampling policy's. A model's logits at t are about the token at t + 1: shift them by one.
    """
    shape = len(rows), max(len(row["token_ids"]) for row in rows)
    batch = {name: np.zeros(shape, np.int64) for name in ("input_ids", "attention_mask", "labels")}
    batch |= {name: np.zeros(shape, np.float32) for name in ("logprobs", "advantages")}
    batch["labels"].fill(-100)  # what cross_entropy ignores
    for at, row in enumerate(rows):
        length, target = len(row["token_ids"]), np.flatnonzero(row["loss_mask"])
        batch["input_ids"][at, :length] = row["token_ids"]
        batch["attention_mask"][at, :length] = 1
        batch["labels"][at, target] = batch["input_ids"][at, target]
        batch["logprobs"][at, target] = np.asarray(row["logprobs"], np.float32)[target]  # NaN where there is no target
        batch["advantages"][at, target] = row["advantage"]
    return batch


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "out"))
