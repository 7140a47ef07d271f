"""`orchard prove EXPORT --upstream URL`: score recorded ids again on the engine and compare.

Not a check of the export's own rules (`orchard validate` does that without an engine). The last line is the verdict.
"""

import asyncio
import logging
import time
from collections import Counter
from pathlib import Path

import aiohttp
import click
import msgspec

from orchard_proxy.assemble import proof
from orchard_proxy.cli.options import json_option
from orchard_proxy.export.dataset import Dataset
from orchard_proxy.schema import packed
from orchard_proxy.upstream import refeed

_log = logging.getLogger(__name__)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was scored again and what came out. Differences are in nats."""

    engine: str
    bound: float
    calls: int
    rollouts: int
    tokens: int
    max_abs: float
    mean_abs: float
    worst: str
    """Call, choice and position of the largest difference."""
    control: str
    """The change that must show."""
    control_max_abs: float
    unusable: dict[str, int]
    """Recorded choices that prove nothing, by reason."""
    seconds: float
    passed: bool
    hint: str


@click.command(name="prove")
@click.argument("export", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--upstream", required=True, metavar="URL", help="The engine itself, not the proxy.")
@click.option("--model", help="Only answers of this model, where the export holds several.")
@click.option("--calls", default=20, show_default=True, type=click.IntRange(1), help="Answers to score again.")
@click.option("--seed", default=0, show_default=True, type=int, help="Which ones.")
@click.option("--bound", type=click.FloatRange(0, min_open=True), help="Largest difference; default by engine.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    export: Path,
    upstream: str,
    model: str | None,
    calls: int,
    seed: int,
    bound: float | None,
    as_json: bool,
) -> None:
    """Score recorded tokens again on the engine, in their recorded context, and compare the log-probabilities.

    A control changes one id, which must show; a comparison that cannot fail would prove nothing.
    """
    dataset = Dataset(export)
    answers, unusable = _answers(dataset, model)
    picked = sorted(proof.pick(answers, calls, seed), key=lambda answer: _context(dataset, answer))
    if not picked:
        raise click.ClickException(f"{export} has no answer that can be scored again: {dict(unusable) or 'no calls'}.")
    report = asyncio.run(_prove(dataset, picked, upstream, seed=seed, bound=bound, unusable=unusable))
    click.echo(msgspec.json.encode(report).decode() if as_json else _text(report, upstream))
    ctx.exit(0 if report.passed else 1)


def _answers(dataset: Dataset, model: str | None) -> tuple[list[proof.Answer], Counter[str]]:
    answers, unusable = [], Counter[str]()
    for call in dataset.calls():
        if model is not None and call.model != model:
            continue
        for choice in call.choices:
            found = proof.usable(call, choice)
            if isinstance(found, str):
                unusable[found] += 1
            else:
                answers.append(found)
    return answers, unusable


async def _prove(
    dataset: Dataset,
    picked: list[proof.Answer],
    url: str,
    *,
    seed: int,
    bound: float | None,
    unusable: Counter[str],
) -> Report:
    began = time.monotonic()
    async with aiohttp.ClientSession() as session:
        first = picked[0]
        scorer = await refeed.detect(refeed.Engine(session, url), first.model, _context(dataset, first))
        differences = [await _again(scorer, dataset, answer) for answer in picked]
        longest = max(picked, key=lambda answer: len(answer.token_ids))
        control, change = await _control(scorer, dataset, longest, seed)
    limit = bound or scorer.bound
    worst = max(range(len(picked)), key=lambda at: differences[at].max_abs)
    tokens = sum(difference.tokens for difference in differences)
    return Report(
        engine=scorer.name,
        bound=limit,
        calls=len(picked),
        rollouts=len({answer.rollout_id for answer in picked}),
        tokens=tokens,
        max_abs=differences[worst].max_abs,
        mean_abs=sum(difference.sum_abs for difference in differences) / max(tokens, 1),
        worst=f"{picked[worst].call_id} choice {picked[worst].choice} token {differences[worst].position}",
        control=f"{longest.call_id} choice {longest.choice} token {change.position}: {change.was} → {change.now}",
        control_max_abs=control.max_abs,
        unusable=dict(unusable),
        seconds=round(time.monotonic() - began, 3),
        passed=proof.holds(differences, control, limit),
        hint=scorer.hint,
    )


async def _again(scorer: refeed.Scorer, dataset: Dataset, answer: proof.Answer) -> proof.Difference:
    ids = packed.unpack_ids(answer.token_ids)
    scores = await scorer.score(answer.model, _context(dataset, answer), ids)
    difference = proof.compare(packed.unpack_floats(answer.logprobs), scores)
    _log.debug("call %s: %d tokens, max |Δ| %.1e", answer.call_id, difference.tokens, difference.max_abs)
    return difference


async def _control(
    scorer: refeed.Scorer, dataset: Dataset, answer: proof.Answer, seed: int
) -> tuple[proof.Difference, proof.Change]:
    context = _context(dataset, answer)
    change = proof.change_one(packed.pack_ids(context), answer.token_ids, seed)
    scores = await scorer.score(answer.model, context, change.token_ids, change.position)
    recorded = packed.unpack_floats(answer.logprobs)[change.position :]
    return proof.compare(recorded, scores), change


def _context(dataset: Dataset, answer: proof.Answer) -> list[int]:
    prompt = dataset.prompt_ids(answer.call_id)
    assert prompt is not None, answer.call_id  # `usable` asked for it
    return packed.unpack_ids(prompt)


def _text(report: Report, url: str) -> str:
    least = proof.CONTROL_FACTOR * report.bound
    skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(report.unusable.items()))
    scored = f"{report.calls} answers of {report.rollouts} rollouts, {report.tokens} tokens"
    numbers = f"{report.max_abs:.1e}  mean {report.mean_abs:.1e}  bound {report.bound:.0e}"
    lines = [
        f"re-feed: {scored}, scored again by {report.engine} at {url} in {report.seconds:.1f} s",
        f"  max |Δ logprob|  {numbers}  ({report.worst})",
        f"  one id changed   {report.control_max_abs:.1e}  must exceed {least:.0e}  ({report.control})",
        *([f"  not usable: {skipped}"] if skipped else []),
        *([] if report.passed else [f"  {_reason(report, least)}"]),
        f"re-feed: {'ok' if report.passed else 'FAILED'}",
    ]
    return "\n".join(lines)


def _reason(report: Report, least: float) -> str:
    if report.max_abs > report.bound:
        return f"The recorded log-probabilities are not this engine's. {report.hint}"
    if report.control_max_abs <= least:
        return "The changed id did not show, so this comparison could not have failed: does the engine read the ids?"
    return "None of the recorded log-probabilities is a number."
