"""From claims to a verdict: what an engine claims of its choices becomes graded evidence, or is refused by name.

Shared by all engines; each says where its ids come from, and this module says what they are worth. The invariant: ids
and log-probabilities of a choice are parallel or the log-probabilities are empty, and a contradiction rejects the call.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from orchard_proxy.engines import evidence
from orchard_proxy.engines.base import Exchange
from orchard_proxy.engines.evidence import Refused
from orchard_proxy.engines.fabricated import is_fabricated
from orchard_proxy.engines.reading import Reading
from orchard_proxy.schema.enums import IdsGrade, LogprobsGrade
from orchard_proxy.schema.packed import Float32s, Int32s, count
from orchard_proxy.schema.records import CallEvidence, Choice, Usage
from orchard_proxy.wire.chat import AnswerChoice


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of one choice."""

    said: AnswerChoice
    ids: list[Any] | None = None
    """None: not known, or not known to be all of them."""
    entries: list[Any] | None = None
    """Logprobs entries, one for each id; None when they are not known to be."""
    sampled: int | None = None
    """Tokens sampled, for a choice without ids."""
    problems: list[str] = []
    """Named already by the engine's own reader."""
    contradicts: bool = False
    """The engine's own reader found a contradiction."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt ids, or why there are none."""

    ids: Int32s | None = None
    problems: list[str] = []
    contradicts: bool = False


def read_prompt(values: Sequence[Any], exchange: Exchange, usage: Usage) -> Prompt:
    """Judge prompt ids that were given once or more, and must then agree."""
    if not values or values[0] == []:
        return Prompt(problems=["no_prompt_ids"])
    if any(other != values[0] for other in values[1:]):
        return Prompt(problems=["prompt_ids_conflict"], contradicts=True)
    packed = evidence.read_ids(values[0], exchange.n_vocab)
    if isinstance(packed, Refused):
        return Prompt(problems=[f"prompt_{packed.problem}"], contradicts=True)
    problem = evidence.usage_problem(packed, usage)
    return Prompt(ids=packed, problems=[problem] if problem else [], contradicts=problem is not None)


def conclude(
    exchange: Exchange, reading: Reading, claims: Sequence[Claim], prompt: Prompt, *, usage_is_sum: bool
) -> CallEvidence:
    """Return the graded evidence of a call."""
    verdicts = [_judge(claim, exchange, reading.answer.usage, prompt, alone=len(claims) == 1) for claim in claims]
    choices = [choice for choice, _ in verdicts]
    problems = [*reading.problems, *reading.contradictions, *(prompt.problems if claims else [])]
    rejected = bool(reading.contradictions) or prompt.contradicts or any(contradicts for _, contradicts in verdicts)
    counted = reading.answer.usage.completion_tokens
    if usage_is_sum and counted is not None and (reading.counts_all or len(claims) == 1) and choices:
        if all(choice.token_ids for choice in choices) and sum(c.sampled_tokens for c in choices) != counted:
            problems.append("ids_usage_mismatch")
            rejected = True
        choices = _with_rest(choices, counted)
    return CallEvidence(
        prompt_ids=prompt.ids,
        choices=choices,
        usage=reading.answer.usage,
        model=reading.answer.model,
        system_fingerprint=reading.answer.system_fingerprint,
        problems=problems,
        rejected=rejected,
    )


def _judge(claim: Claim, exchange: Exchange, usage: Usage, prompt: Prompt, *, alone: bool) -> tuple[Choice, bool]:
    """Return the choice and whether its evidence contradicts itself."""
    problems = list(claim.problems)
    contradicts = claim.contradicts
    ids: Int32s = b""
    logprobs: Float32s = b""
    if claim.ids:
        ids, logprobs, found = _arrays(claim.ids, claim.entries, exchange.n_vocab)
        if ids and is_fabricated(claim.said, claim.ids, claim.entries, usage if alone else Usage(), exchange.request):
            found.append("fabricated_ids")
        problems += [problem for problem in found if not (problems and problem == "no_logprobs")]
        contradicts = contradicts or any(problem not in ("no_logprobs", "logprob_missing") for problem in found)
    elif claim.entries and claim.ids is not None:
        problems.append("ids_logprobs_length")
        contradicts = True
    elif not problems:
        problems.append("no_ids")
    if claim.said.finish_reason is None:
        problems.append("no_finish_reason")
    trusted = bool(ids) and prompt.ids is not None
    choice = Choice(
        index=claim.said.index,
        token_ids=ids,
        logprobs=logprobs,
        sampled_tokens=count(ids) if ids else _sampled(claim, usage, alone=alone),
        finish_reason=claim.said.finish_reason,
        stop_reason=claim.said.stop_reason,
        message=claim.said.message,
        ids_grade=IdsGrade.ENGINE if trusted else IdsGrade.NONE,
        logprobs_grade=_grade(exchange.logprobs_mode) if logprobs else LogprobsGrade.NONE,
        problems=problems,
    )
    return choice, contradicts


def _arrays(ids: list[Any], entries: list[Any] | None, n_vocab: int | None) -> tuple[Int32s, Float32s, list[str]]:
    """Return ids and log-probabilities, as far as each can be taken, and what is wrong with them."""
    packed = evidence.read_ids(ids, n_vocab)
    if isinstance(packed, Refused):
        return b"", b"", [packed.problem]
    if not entries:
        return packed, b"", ["no_logprobs"] if entries is None else ["ids_logprobs_length"]
    if len(entries) != len(ids):
        return packed, b"", ["ids_logprobs_length"]
    if evidence.contradicts_entries(ids, entries):
        return packed, b"", ["ids_token_id_mismatch"]
    if all(isinstance(entry, dict) and "logprob" not in entry for entry in entries):
        return packed, b"", ["logprob_missing"]
    logprobs = evidence.read_logprobs(evidence.entry_member(entries, "logprob"))
    return (packed, b"", [logprobs.problem]) if isinstance(logprobs, Refused) else (packed, logprobs, [])


def _grade(mode: str) -> LogprobsGrade:
    return LogprobsGrade(mode) if mode in tuple(LogprobsGrade) else LogprobsGrade.NONE


def _sampled(claim: Claim, usage: Usage, *, alone: bool) -> int:
    """Count the tokens of a choice whose ids are not known."""
    if claim.sampled is not None:
        return claim.sampled
    if alone and usage.completion_tokens is not None:
        return usage.completion_tokens
    return len(claim.ids or claim.entries or ())


def _with_rest(choices: list[Choice], counted: int) -> list[Choice]:
    """Give tokens that the usage counts and no choice holds to the first choice without ids: the sum is then right."""
    rest = counted - sum(choice.sampled_tokens for choice in choices)
    for position, choice in enumerate(choices):
        if rest > 0 and not choice.token_ids:
            more = msgspec.structs.replace(choice, sampled_tokens=choice.sampled_tokens + rest)
            return [*choices[:position], more, *choices[position + 1 :]]
    return choices
