"""`orchard rollouts ls|show`: what the catalog holds, for a person or as JSON."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from orchard_proxy.assemble import masks, samples
from orchard_proxy.cli.options import data_option, json_option
from orchard_proxy.cli.table import print_table
from orchard_proxy.errors import OrchardError
from orchard_proxy.export import source
from orchard_proxy.export.jsontext import json_text
from orchard_proxy.record.catalog import Catalog
from orchard_proxy.record.queries import Filter
from orchard_proxy.schema.enums import RolloutStatus
from orchard_proxy.schema.records import Accounting, Call, Choice, Rollout, Sample


@click.group(name="rollouts")
def command() -> None:
    """List recorded rollouts, or show one call by call."""


@command.command("ls")
@data_option
@click.option("--status", type=click.Choice([str(status) for status in RolloutStatus]), help="Only these.")
@click.option("--group", "group_id", help="Only this group.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1), help="The newest so many.")
@json_option
def list_rollouts(*, data_dir: Path, status: str | None, group_id: str | None, limit: int, as_json: bool) -> None:
    """List the newest rollouts in the order of their start, the newest last."""
    rows: list[dict[str, Any]] = []
    if source.derived(data_dir):
        with Catalog.open(data_dir) as catalog:
            found = catalog.newest_rollouts(Filter(status=status, group_id=group_id), limit=limit + 1)
            rows = [_summary(rollout, *catalog.totals(rollout.rollout_id)) for rollout in found]
    if len(rows) > limit:
        newest = "only the newest is" if limit == 1 else f"only the newest {limit} are"
        click.echo(f"orchard: {newest} listed; more with --limit", err=True)
    rows = rows[-limit:]
    if as_json:
        click.echo(_json(rows))
        return
    headers = ("rollout_id", "status", "reward", "group_id", "task_id", "attempt", "model", "calls", "sampled_tokens")
    print_table([*headers, "started_at"], [[row[name] for name in (*headers, "started_at")] for row in rows])


@command.command("show")
@click.argument("rollout_id")
@data_option
@json_option
def show(*, rollout_id: str, data_dir: Path, as_json: bool) -> None:
    """Show one rollout with its calls: outcome, tokens, branches, parent, and why tokens are masked."""
    rollout, calls = _load(data_dir, rollout_id)
    built, accounting = samples.build(rollout, calls)
    lines = [line for call in calls for line in _lines(rollout, call, calls, built)]
    summary = _summary(rollout, len(calls), accounting.sampled)
    if as_json:
        click.echo(_json(summary | _detail(accounting, built) | {"choices": lines}))
        return
    for name, value in summary.items():
        if value not in (None, [], False, msgspec.Raw(b"{}")):
            click.echo(f"{name}: {value if isinstance(value, str) else _json(value)}")
    click.echo(f"{accounting.line()}\n")
    headers = list(_LINE)
    print_table(headers, [[_cell(line[name]) for name in headers] for line in lines])


_LINE = (
    "seq",
    "choice",
    "parent",
    "outcome",
    "delivery",
    "prompt",
    "sampled",
    "branches",
    "masked",
    "problems",
    "call",
)


def _load(data_dir: Path, rollout_id: str) -> tuple[Rollout, list[Call]]:
    if source.derived(data_dir):
        with Catalog.open(data_dir) as catalog:
            rollout = catalog.rollout(rollout_id)
            if rollout is not None:
                return rollout, catalog.calls(rollout_id)
    raise OrchardError(f"{data_dir} has no rollout {rollout_id!r}; `orchard rollouts ls --data {data_dir}` lists them.")


def _summary(rollout: Rollout, calls: int, sampled_tokens: int) -> dict[str, Any]:
    row = msgspec.structs.asdict(rollout)
    times = {"started_at": _time(row.pop("started_us")), "finished_at": _time(row.pop("finished_us"))}
    rewards = [
        {"name": r.name, "value": r.value, "set_at": _time(r.set_us), "version": r.version} for r in rollout.rewards
    ]
    metadata = msgspec.Raw(json_text(rollout.metadata).encode())
    counts = {"calls": calls, "sampled_tokens": sampled_tokens}
    return row | times | counts | {"rewards": rewards, "metadata": metadata}


def _detail(accounting: Accounting, built: list[Sample]) -> dict[str, Any]:
    rows = [
        {"sample_id": s.sample_id, "branch_reason": s.branch_reason, "tokens": len(s.loss_mask), "turns": s.turns}
        for s in built
    ]
    return {"accounting": accounting, "invariant": accounting.line(), "samples": rows}


def _lines(rollout: Rollout, call: Call, calls: list[Call], built: list[Sample]) -> list[dict[str, Any]]:
    """Return a line for each choice of a call, or one for a call without choices."""
    numbers = {other.call_id: other.seq for other in calls}
    line = {
        "seq": call.seq,
        "call": call.call_id,
        "choice": None,
        "parent": numbers.get(call.parent_call_id) if call.parent_call_id else None,
        "outcome": call.outcome,
        "delivery": call.delivery,
        "prompt": call.prompt_tokens,
        "sampled": 0,
        "branches": [],
        "masked": None,
        "problems": call.problems,
    }
    return [line | _of_choice(rollout, call, choice, built) for choice in call.choices] or [line]


def _of_choice(rollout: Rollout, call: Call, choice: Choice, built: list[Sample]) -> dict[str, Any]:
    here = (call.call_id, choice.index)
    return {
        "choice": choice.index,
        "sampled": masks.sampled_tokens(choice),
        "branches": [s.branch for s in built if here in [(turn.call_id, turn.choice) for turn in s.turns]],
        "masked": masks.masked_reason(rollout, call, choice),
        "problems": [*call.problems, *choice.problems],
    }


def _cell(value: Any) -> Any:
    return ",".join(map(str, value)) or None if isinstance(value, list) else value


def _time(microseconds: int | None) -> str | None:
    if microseconds is None:
        return None
    return datetime.fromtimestamp(microseconds / 1e6, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
