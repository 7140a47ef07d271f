"""Recorded rollouts for the tests of tests/export, made by the real forest and the real samples."""

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq

from orchard_proxy.assemble.forest import Forest, Sampled
from orchard_proxy.assemble.samples import build
from orchard_proxy.export import arrow, manifest
from orchard_proxy.export.item import Item
from orchard_proxy.export.writer import write
from orchard_proxy.schema.columns import TABLES
from orchard_proxy.schema.enums import Blame, Delivery, IdsGrade, LogprobsGrade, Outcome, Phase, RolloutStatus
from orchard_proxy.schema.packed import pack_floats, pack_ids
from orchard_proxy.schema.records import (
    Call,
    Choice,
    Failure,
    RewardEntry,
    Rollout,
    Usage,
    VersionSpan,
)

INFRA = Failure(code="node_lost", blame=Blame.INFRA, phase=Phase.RUN, retryable=True, message="The node was lost.")
T0 = 1_790_000_000_000_000


def choice(index: int, ids: list[int], **over: Any) -> Choice:
    known = {
        "index": index,
        "token_ids": pack_ids(ids),
        "logprobs": pack_floats([-0.1 * (1 + position) - index for position in range(len(ids))]),
        "sampled_tokens": len(ids),
        "finish_reason": "stop",
        "message": msgspec.Raw(b'{"role":"assistant","content":"a%d"}' % index),
        "versions": [VersionSpan(version="7", start=0, end=len(ids))] if ids else [],
        "ids_grade": IdsGrade.ENGINE if ids else IdsGrade.NONE,
        "logprobs_grade": LogprobsGrade.RAW if ids else LogprobsGrade.NONE,
    }
    return Choice(**{**known, **over})


class Recording:
    """One rollout and its calls, told in commit order."""

    first_commit = 0

    def __init__(self, rollout_id: str, **over: Any) -> None:
        self.rollout = Rollout(**{"rollout_id": rollout_id, "started_us": T0, "group_id": "g", "reward": 0.5, **over})
        self.calls: list[Call] = []
        self._forest = Forest()

    def call(self, prompt: list[int] | None, *answers: list[int] | Choice, rejected: bool = False, **over: Any) -> Call:
        choices = [one if isinstance(one, Choice) else choice(i, one) for i, one in enumerate(answers)]
        seq = len(self.calls)
        call_id = hashlib.md5(f"{self.rollout.rollout_id}/{seq}".encode()).hexdigest()
        placed: dict[str, Any] = {"parent_call_id": None, "parent_choice": None, "prompt": None}
        if prompt is not None and rejected:
            placed["prompt"] = self._forest.refer(call_id, pack_ids(prompt))
        elif prompt is not None:
            nodes = [Sampled(one.index, one.token_ids) for one in choices if one.ids_grade is not IdsGrade.NONE]
            placement = self._forest.add(call_id, pack_ids(prompt), nodes)
            parent = placement.parent
            placed = {
                "parent_call_id": parent.call_id if parent else None,
                "parent_choice": parent.choice if parent else None,
                "prompt": placement.prompt,
            }
        record: dict[str, Any] = {
            "call_id": call_id,
            "rollout_id": self.rollout.rollout_id,
            "seq": seq,
            "commit_seq": Recording.first_commit,
            "dialect": "chat",
            "engine": "vllm",
            "stream": seq % 2 == 1,
            "model": "m",
            "outcome": Outcome.COMPLETE,
            "delivery": Delivery.CONFIRMED,
            "late": False,
            "failure": None,
            "begun_us": T0 + seq * 1_000_000,
            "ended_us": T0 + seq * 1_000_000 + 500_000,
            "ttft_s": 0.25 if seq else None,
            "duration_s": 0.5,
            "prompt_tokens": None if prompt is None else len(prompt),
            "choices": choices,
            "usage": Usage(prompt_tokens=None if prompt is None else len(prompt)),
            "sampling": msgspec.Raw(b'{"temperature":1.0}'),
            "messages": msgspec.Raw(b'[{"role":"user","content":"q%d"}]' % seq),
            "tools": msgspec.Raw(b"null"),
            "edits": ["return_token_ids"],
            "problems": [],
            "evidence_rejected": rejected,
            "http_status": 200,
        }
        Recording.first_commit += 1
        self.calls.append(Call(**{**record, **placed, **over}))
        return self.calls[-1]

    def item(self) -> Item:
        samples, accounting = build(self.rollout, self.calls)
        return Item(self.rollout, self.calls, samples, accounting)


def varied() -> list[Item]:
    """Return rollouts in which every kind of branch and most masked reasons occur."""
    return [told_main().item(), told_infra().item(), Recording("still-running", reward=None, group_id=None).item()]


def told_main() -> Recording:
    rewards = [RewardEntry(name="tests", value=0.5, set_us=T0 + 9, version=1)]
    done = {"status": RolloutStatus.COMPLETED, "finished_us": T0 + 10, "rewards": rewards, "reward_version": 1}
    story = Recording("main", task_id="t1", metadata=msgspec.Raw(b'{"note": NaN}'), **done)
    story.call([1, 2, 3], [10, 11])
    story.call([1, 2, 3, 10, 11, 4], [12], [13, 14], problems=["seen"])
    story.call([1, 2, 3, 10, 11, 4, 12, 5], [15, 16, 17])
    story.call([1, 2, 3, 10, 11, 9], [18], outcome=Outcome.LENGTH)
    story.call([1, 2, 3, 10, 11, 9, 18, 8], [19], delivery=Delivery.UNCERTAIN)
    story.call([1, 2, 3, 10, 11, 9, 18, 8], [19, 20], outcome=Outcome.UPSTREAM_CUT, delivery=Delivery.NONE)
    story.call([7, 7], choice(0, [21, 22, 23], logprobs=pack_floats([-0.5, float("nan"), -0.25])))
    story.call(None, choice(0, [], sampled_tokens=4))
    story.call([7, 7, 21], [24, 25], rejected=True, problems=["ids_logprobs_length"])
    story.call([7, 8], choice(0, [26], logprobs=b"", logprobs_grade=LogprobsGrade.NONE))
    story.call([6], outcome=Outcome.ENGINE_ERROR, http_status=500)
    return story


def told_infra() -> Recording:
    story = Recording("lost", failure=INFRA, status=RolloutStatus.FAILED, reward=float("nan"), finished_us=T0 + 10)
    story.call([1, 2], [3, 4])
    return story


def chains(rollouts: int, turns: int, *, first: int, turn: int, answer: int) -> Iterator[Item]:
    """Yield rollouts that are one chain each: `first` prompt tokens, then `turn` new and `answer` sampled a turn."""
    rng = random.Random(1)
    for number in range(rollouts):
        story = Recording(f"chain-{number}")
        history = rng.choices(range(50_000), k=first)
        for _ in range(turns):
            sampled = rng.choices(range(50_000), k=answer)
            logprobs = pack_floats([-rng.expovariate(1) for _ in sampled])
            story.call(history, choice(0, sampled, logprobs=logprobs))
            history = [*history, *sampled, *rng.choices(range(50_000), k=turn)]
        yield story.item()


Row = dict[str, Any]


def export(out: Path) -> Path:
    write(varied(), out)
    return out


def rewrite(out: Path, table: str, change: Callable[[list[Row]], Any]) -> None:
    """Change the rows of a table and put the manifest right again, so that only the rows tell."""
    path = out / table / "part-00000.parquet"
    rows = [row for batch in pq.ParquetFile(path).iter_batches() for row in arrow.rows(TABLES[table], batch)]
    footer = pq.read_metadata(path).metadata
    change(rows)
    with pq.ParquetWriter(path, arrow.schema(table)) as writer:
        writer.write_batch(arrow.record_batch(table, rows))
        writer.add_key_value_metadata({k: v for k, v in footer.items() if k.startswith(b"orchard.")})
    restate(out)


def restate(out: Path, **over: Any) -> None:
    """Make the manifest state the files as they are, and whatever else is given."""
    stated = manifest.read(out)
    files = []
    for entry in stated.files:
        data = (out / entry.path).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        n_rows = pq.read_metadata(out / entry.path).num_rows if entry.table else None
        files.append(msgspec.structs.replace(entry, bytes=len(data), sha256=digest, rows=n_rows))
    counts = {table: sum(f.rows or 0 for f in files if f.table == table) for table in TABLES}
    stated = msgspec.structs.replace(stated, files=files, counts=msgspec.structs.replace(stated.counts, **counts))
    (out / manifest.NAME).write_bytes(manifest.encode(msgspec.structs.replace(stated, **over)))
