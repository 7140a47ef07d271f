"""The arithmetic of the re-feed proof."""

import math

import msgspec
import pytest
from storybook import Story, answer

from orchard_proxy.assemble import proof
from orchard_proxy.schema.enums import IdsGrade, LogprobsGrade
from orchard_proxy.schema.packed import pack_floats, pack_ids, unpack_ids

NAN = float("nan")
NEUTRAL = b'{"temperature": 1.0, "top_p": 1, "top_k": -1}'


def made(rollout: str, call: str) -> proof.Answer:
    return proof.Answer(
        rollout_id=rollout, call_id=call, choice=0, model=None, token_ids=pack_ids([1]), logprobs=pack_floats([-1])
    )


def usable(choice, *, prompt=(1, 2), sampling=b"{}", **over):
    call = Story().call(None if prompt is None else list(prompt), choice, sampling=msgspec.Raw(sampling), **over)
    return proof.usable(call, call.choices[0])


RAW = {"logprobs_grade": LogprobsGrade.RAW}
PROCESSED = {"logprobs_grade": LogprobsGrade.PROCESSED}


@pytest.mark.parametrize(
    ("choice", "more", "reason"),
    [
        (answer(0, [3, 4], **RAW), {"rejected": True}, "evidence_rejected"),
        (answer(0, [3, 4], **RAW), {"prompt": None}, "no_ids"),
        (answer(0, [], **RAW), {}, "no_ids"),
        (answer(0, [3], **RAW, ids_grade=IdsGrade.NONE), {}, "no_ids"),
        (answer(0, [3, 4], **RAW, logprobs=pack_floats([-1])), {}, "no_logprobs"),
        (answer(0, [3, 4], logprobs_grade=LogprobsGrade.NONE), {}, "no_logprobs"),
        (answer(0, [3, 4], **PROCESSED), {}, "processed_logprobs"),
        (answer(0, [3, 4], **PROCESSED), {"sampling": b'{"temperature": 0.7}'}, "processed_logprobs"),
        (answer(0, [3, 4], **PROCESSED), {"sampling": NEUTRAL[:-1] + b', "min_p": 0.1}'}, "processed_logprobs"),
        (
            answer(0, [3, 4], **PROCESSED),
            {"sampling": NEUTRAL[:-1] + b', "logit_bias": {"5": 1}}'},
            "processed_logprobs",
        ),
        (answer(0, [3, 4], **PROCESSED), {"sampling": b"NaN"}, "processed_logprobs"),
    ],
    ids=str,
)
def test_what_cannot_be_scored_again_has_a_reason(choice, more, reason):
    assert usable(choice, **more) == reason


@pytest.mark.parametrize(
    ("choice", "sampling"),
    [
        (answer(2, [3, 4], **RAW), b'{"temperature": 0.3, "top_p": 0.5}'),
        (answer(2, [3, 4], **PROCESSED), NEUTRAL),
        (answer(2, [3, 4], **PROCESSED), NEUTRAL[:-1] + b', "min_p": 0, "presence_penalty": null, "logit_bias": {}}'),
    ],
    ids=["raw", "processed, neutral", "processed, neutral in words"],
)
def test_what_can_be_scored_again(choice, sampling):
    found = usable(choice, sampling=sampling)
    assert isinstance(found, proof.Answer)
    assert (found.choice, unpack_ids(found.token_ids)) == (2, [3, 4])


@pytest.mark.parametrize("count", [1, 3, 4, 9, 100])
def test_rollouts_take_turns(count):
    answers = [made(rollout, f"{rollout}{call}") for rollout in "abc" for call in range(4)]
    picked = proof.pick(answers, count, seed=1)
    assert len({answer.call_id for answer in picked}) == len(picked) == min(count, 12)
    per_rollout = [sum(answer.rollout_id == rollout for answer in picked) for rollout in "abc"]
    assert max(per_rollout) - min(per_rollout) <= 1


def test_a_seed_chooses_and_repeats():
    answers = [made(rollout, f"{rollout}{call}") for rollout in "abcdefgh" for call in range(9)]
    assert proof.pick(answers, 5, seed=3) == proof.pick(answers, 5, seed=3)
    assert proof.pick(answers, 5, seed=3) != proof.pick(answers, 5, seed=4)
    assert proof.pick([], 5, seed=3) == []


@pytest.mark.parametrize(
    ("recorded", "again", "expected"),
    [
        ([-1.0, -2.0], [-1.0, -2.5], (2, 0.5, 1)),
        ([-1.0, NAN], [-1.25, -9.0], (1, 0.25, 0)),
        ([-1.0, -2.0], [-1.0, NAN], (2, math.inf, 1)),
        ([-1.0], [-math.inf], (1, math.inf, 0)),
        ([], [], (0, 0.0, -1)),
        ([NAN], [-1.0], (0, 0.0, -1)),
    ],
    ids=["largest", "unknown left out", "score is not a number", "score is zero", "empty", "nothing known"],
)
def test_compare(recorded, again, expected):
    difference = proof.compare(recorded, again)
    assert (difference.tokens, difference.max_abs, difference.position) == expected


def test_compare_refuses_unequal_lengths():
    with pytest.raises(ValueError, match="shorter"):
        proof.compare([-1.0, -2.0], [-1.0])


@pytest.mark.parametrize("ids", [[5], [5, 5, 5], [7, 8, 9, 10], list(range(100))], ids=len)
@pytest.mark.parametrize("prompt", [[], [5], [1, 2, 3]], ids=len)
def test_one_id_is_changed_in_the_first_half_to_one_of_the_context(prompt, ids):
    for seed in range(20):
        change = proof.change_one(pack_ids(prompt), pack_ids(ids), seed)
        differing = [at for at, (a, b) in enumerate(zip(ids, change.token_ids, strict=True)) if a != b]
        assert differing == [change.position]
        assert change.position < (len(ids) + 1) / 2
        assert (change.was, change.now) == (ids[change.position], change.token_ids[change.position])
        assert change.now in {*prompt, *ids} or {*prompt, *ids} == {ids[0]}
        assert change.now >= 0


GOOD = proof.compare([-1.0, -2.0], [-1.0, -2.00005])
OFF = proof.compare([-1.0], [-1.002])
MOVED = proof.compare([-1.0], [-3.0])


@pytest.mark.parametrize(
    ("differences", "control", "passes"),
    [
        ([GOOD, GOOD], MOVED, True),
        ([GOOD, OFF], MOVED, False),
        ([GOOD], GOOD, False),
        ([GOOD], OFF, False),
        ([], MOVED, False),
        ([proof.compare([NAN], [-1.0])], MOVED, False),
    ],
    ids=["holds", "one is off", "control did not move", "control moved too little", "no answers", "no numbers"],
)
def test_a_proof_can_fail(differences, control, passes):
    assert proof.holds(differences, control, bound=1e-3) is passes
