"""The arithmetic of the re-feed proof: which recorded answers to score again, and what the scores say.

Not the scoring: an engine does that (`upstream.refeed`). Nothing here reads a file or a clock.

Invariant: a proof never passes for lack of evidence. No answers, a score that is not a number, or a control that did
not move fail it.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from orchard_proxy.assemble import masks
from orchard_proxy.schema import packed
from orchard_proxy.schema.enums import LogprobsGrade
from orchard_proxy.schema.packed import Float32s, Int32s
from orchard_proxy.schema.records import Call, Choice

CONTROL_FACTOR = 10
"""A changed id must move a score by more than this many times the bound."""

_STATED: dict[str, tuple[float, ...]] = {"temperature": (1,), "top_p": (1,), "top_k": (0, -1)}
"""What a request must say, for an engine may have defaults of its own."""
_ABSENT_OR: dict[str, tuple[float, ...]] = {
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded choice that can be scored again."""

    rollout_id: str
    call_id: str
    choice: int
    model: str | None
    token_ids: Int32s
    logprobs: Float32s


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """The control: one id of an answer, changed."""

    position: int
    was: int
    now: int
    token_ids: list[int]
    """The whole answer with the change in it."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded against scored again, in nats."""

    tokens: int
    max_abs: float
    sum_abs: float
    position: int
    """Of the largest; -1 when there are no tokens."""


def usable(call: Call, choice: Choice) -> Answer | str:
    """Return the answer to score again, or the reason why this one proves nothing."""
    if call.evidence_rejected:
        return "evidence_rejected"
    if not masks.has_ids(call, choice):
        return "no_ids"
    if len(choice.logprobs) != len(choice.token_ids) or choice.logprobs_grade is LogprobsGrade.NONE:
        return "no_logprobs"
    if choice.logprobs_grade is LogprobsGrade.PROCESSED and not _neutral(call.sampling):
        return "processed_logprobs"  # of a distribution that a bare score does not give
    return Answer(
        rollout_id=call.rollout_id,
        call_id=call.call_id,
        choice=choice.index,
        model=call.model,
        token_ids=choice.token_ids,
        logprobs=choice.logprobs,
    )


def pick(answers: Iterable[Answer], count: int, seed: int) -> list[Answer]:
    """Choose `count` answers at random, taking turns over the rollouts; fewer when there are fewer."""
    chance = random.Random(seed)  # noqa: S311 (a repeatable choice, not a secret)
    of_rollout: defaultdict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        of_rollout[answer.rollout_id].append(answer)
    queues = list(of_rollout.values())
    for queue in queues:
        chance.shuffle(queue)
    chance.shuffle(queues)
    rounds = range(max(map(len, queues), default=0))
    return [queue[turn] for turn in rounds for queue in queues if turn < len(queue)][:count]


def compare(recorded: Sequence[float], again: Sequence[float]) -> Difference:
    """Compare two equally long runs of log-probabilities. A recorded NaN means "not known" and is left out."""
    known = [(abs(a - b), at) for at, (a, b) in enumerate(zip(recorded, again, strict=True)) if not math.isnan(a)]
    deltas = [(math.inf if math.isnan(delta) else delta, at) for delta, at in known]
    worst, position = max(deltas, default=(0.0, -1))
    return Difference(
        tokens=len(deltas), max_abs=worst, sum_abs=math.fsum(delta for delta, _ in deltas), position=position
    )


def change_one(prompt_ids: Int32s, token_ids: Int32s, seed: int) -> Change:
    """Change one id in the first half of an answer to another id of the same context, so that it exists."""
    chance = random.Random(seed)  # noqa: S311 (a repeatable choice, not a secret)
    ids = packed.unpack_ids(token_ids)
    position = chance.randrange((len(ids) + 1) // 2)
    others = sorted({*packed.unpack_ids(prompt_ids), *ids} - {ids[position]})
    now = chance.choice(others) if others else ids[position] ^ 1
    return Change(position=position, was=ids[position], now=now, token_ids=[*ids[:position], now, *ids[position + 1 :]])


def holds(differences: Sequence[Difference], control: Difference, bound: float) -> bool:
    """Say whether the recorded log-probabilities are the engine's own, and the comparison could have failed."""
    scored = sum(difference.tokens for difference in differences)
    within = all(difference.max_abs <= bound for difference in differences)
    return scored > 0 and within and control.max_abs > CONTROL_FACTOR * bound


def _neutral(sampling: msgspec.Raw) -> bool:
    """Say whether the processed distribution was the bare model's."""
    try:
        asked = msgspec.json.decode(sampling, type=dict[str, object])
    except msgspec.DecodeError:
        return False
    stated = all(asked.get(name) in neutral for name, neutral in _STATED.items())
    others = all(asked.get(name) in (None, *neutral) for name, neutral in _ABSENT_OR.items())
    return stated and others and not asked.get("logit_bias")
