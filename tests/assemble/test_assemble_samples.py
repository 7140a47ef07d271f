import json
import math
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from storybook import Story, answer, rollout

from orchard_proxy.assemble.prompts import PromptResolver
from orchard_proxy.assemble.samples import build
from orchard_proxy.schema.enums import Blame, Delivery, IdsGrade, LogprobsGrade, MaskedReason, Outcome, Phase
from orchard_proxy.schema.packed import count, pack_floats, unpack_floats, unpack_ids
from orchard_proxy.schema.records import Failure, Sample, VersionSpan

INFRA = Failure(code="node_lost", blame=Blame.INFRA, phase=Phase.RUN)


def told(story: Story, **over):
    return build(rollout(**over), story.calls)


def masks(samples: list[Sample]) -> list[list[int]]:
    return [list(sample.loss_mask) for sample in samples]


def reasons(samples: list[Sample]) -> list[str]:
    return [str(sample.branch_reason) for sample in samples]


def test_one_call_is_one_row():
    story = Story()
    story.call([1, 2], [3, 4])
    (sample,), accounting = told(story)
    assert unpack_ids(sample.token_ids) == [1, 2, 3, 4]
    assert list(sample.loss_mask) == [0, 0, 1, 1]
    assert [math.isnan(value) for value in unpack_floats(sample.logprobs)] == [True, True, False, False]
    assert (sample.sample_id, sample.branch, sample.reward, sample.group_id) == ("r-0", 0, 1.0, "g")
    assert accounting.line() == "sampled 2 = trained 2"
    assert accounting.holds


def test_turns_join_into_one_row_and_template_tokens_are_not_targets():
    story = Story()
    story.call([1], [2])
    story.call([1, 2, 9], [3])
    (sample,), _ = told(story)
    assert list(sample.loss_mask) == [0, 1, 0, 1]
    assert [(turn.call_id, turn.start, turn.end, turn.trained) for turn in sample.turns] == [
        ("c0", 1, 2, True),
        ("c1", 3, 4, True),
    ]


def test_two_hundred_turns_are_one_row():
    story, history = Story(), [1]
    for turn in range(200):
        story.call(history, [turn, turn])
        history = [*history, turn, turn, 7]
    samples, accounting = told(story)
    assert reasons(samples) == ["main"]
    assert (accounting.sampled, accounting.trained) == (400, 400)


def test_the_same_prompt_and_answer_twice_are_two_rows():
    story = Story()
    story.call([1], [2])
    story.call([1], [2])
    samples, accounting = told(story)
    assert (reasons(samples), masks(samples)) == (["main", "root"], [[0, 1], [0, 1]])
    assert accounting.trained == 2


def test_two_calls_of_two_choices_are_four_rows():
    story = Story()
    story.call([1], [2], [3])
    story.call([1], [4], [5])
    samples, _ = told(story)
    assert reasons(samples) == ["main", "choice", "root", "choice"]
    assert [unpack_ids(sample.token_ids) for sample in samples] == [[1, 2], [1, 3], [1, 4], [1, 5]]


def test_choices_of_a_later_turn_share_its_history_once():
    story = Story()
    story.call([1], [2])
    story.call([1, 2], [3], [4])
    samples, accounting = told(story)
    assert (reasons(samples), masks(samples)) == (["main", "choice"], [[0, 1, 1], [0, 0, 1]])
    assert accounting.trained == 3


def test_rolling_back_forks_and_trains_the_shared_turn_once():
    story = Story()
    story.call([1], [2])
    story.call([1, 2, 8], [3])
    story.call([1, 2, 9], [4])
    samples, _ = told(story)
    assert (reasons(samples), masks(samples)) == (["main", "fork"], [[0, 1, 0, 1], [0, 0, 0, 1]])
    second = samples[1].turns[0]
    assert (second.trained, second.masked_reason) == (False, None)


def test_rows_stand_in_the_order_in_which_their_leaves_were_committed():
    story = Story()
    story.call([1], [2])
    story.call([1, 2, 8], [3])
    story.call([1, 2, 9], [4])
    story.call([1, 2, 8, 3, 8], [5])
    samples, _ = told(story)
    assert [unpack_ids(sample.token_ids) for sample in samples] == [[1, 2, 9, 4], [1, 2, 8, 3, 8, 5]]
    assert masks(samples) == [[0, 1, 0, 1], [0, 0, 0, 1, 0, 1]]


def test_another_system_prompt_is_another_root_with_the_same_reward():
    story = Story()
    story.call([1], [2])
    story.call([7], [8])
    samples, _ = told(story, reward=0.25)
    assert (reasons(samples), [sample.reward for sample in samples]) == (["main", "root"], [0.25, 0.25])


def test_two_live_leaves_with_ten_shared_turns_claim_each_token_once():
    story, history = Story(), [1]
    for turn in range(10):
        story.call(history, [turn])
        history = [*history, turn, 70]
    story.call([*history, 5], [6])
    story.call([*history, 6], [7])
    samples, accounting = told(story)
    assert [sum(sample.loss_mask) for sample in samples] == [11, 1]
    assert accounting.trained == 12


@pytest.mark.parametrize(
    ("over", "reason"),
    [
        pytest.param({"outcome": Outcome.CLIENT_GONE, "delivery": Delivery.NONE}, "client_gone", id="client-gone"),
        pytest.param({"outcome": Outcome.UPSTREAM_CUT}, "upstream_cut", id="cut"),
        pytest.param({"outcome": Outcome.ENGINE_ERROR}, "engine_error", id="engine-error"),
        pytest.param({"outcome": Outcome.CRASHED, "delivery": Delivery.NONE}, "crashed", id="crashed"),
        pytest.param({"late": True}, "late", id="late"),
        pytest.param({"delivery": Delivery.UNCERTAIN}, "uncertain", id="uncertain"),
        pytest.param({"rejected": True}, "evidence_rejected", id="rejected"),
    ],
)
def test_a_call_that_must_not_be_trained_says_why(over, reason):
    story = Story()
    story.call([1], [2, 3], **over)
    samples, accounting = told(story)
    assert (accounting.trained, accounting.masked) == (0, {reason: 2})
    assert all(turn.masked_reason == reason for sample in samples for turn in sample.turns)
    assert all(sum(sample.loss_mask) == 0 for sample in samples)


@pytest.mark.parametrize("outcome", [Outcome.COMPLETE, Outcome.LENGTH])
def test_complete_and_length_are_trained(outcome):
    story = Story()
    story.call([1], [2, 3], outcome=outcome)
    assert told(story)[1].trained == 2


def test_the_reason_nearest_to_the_token_is_named():
    story = Story()
    story.call([1], [2], outcome=Outcome.CLIENT_GONE, delivery=Delivery.NONE, late=True, rejected=True)
    story.call([3], [4], delivery=Delivery.UNCERTAIN, rejected=True)
    story.call(None, answer(0, [], sampled_tokens=3))
    story.call([5], [6])
    assert told(story, failure=INFRA)[1].masked == {"client_gone": 1, "uncertain": 1, "no_ids": 3, "infra": 1}


def test_an_infra_failure_masks_the_rollout_and_another_blame_does_not():
    story = Story()
    story.call([1], [2, 3])
    samples, accounting = told(story, failure=INFRA)
    assert (masks(samples), accounting.masked) == ([[0, 0, 0]], {"infra": 2})
    assert told(story, failure=replace(INFRA, blame=Blame.AGENT))[1].trained == 2


@pytest.mark.parametrize("outcome", [Outcome.UPSTREAM_CUT, Outcome.ENGINE_ERROR, Outcome.CRASHED])
def test_a_retry_after_a_failure_continues_the_clean_path(outcome):
    story = Story()
    story.call([1], [2])
    story.call([1, 2, 8], [3], outcome=outcome)
    story.call([1, 2, 8], [3, 4])
    story.call([1, 2, 8, 3, 4, 8], [5])
    samples, accounting = told(story)
    assert (reasons(samples), masks(samples)) == (["main"], [[0, 1, 0, 1, 1, 0, 1]])
    assert (accounting.trained, accounting.masked) == (4, {str(outcome): 1})


def test_a_failure_at_the_end_leaves_the_row_of_what_was_said_before():
    story = Story()
    story.call([1], [2])
    story.call([1, 2, 8], [3], outcome=Outcome.ENGINE_ERROR)
    samples, accounting = told(story)
    assert masks(samples) == [[0, 1]]
    assert accounting.line() == "sampled 2 = trained 1 + 1 engine_error"


def test_a_path_may_run_through_an_answer_that_is_not_trained():
    story = Story()
    story.call([1], [2], outcome=Outcome.CLIENT_GONE, delivery=Delivery.NONE)
    story.call([1, 2, 8], [3])
    (sample,), accounting = told(story)
    assert list(sample.loss_mask) == [0, 0, 0, 1]
    assert [turn.masked_reason for turn in sample.turns] == [MaskedReason.CLIENT_GONE, None]
    assert accounting.masked == {"client_gone": 1}


def test_a_call_without_ids_is_a_row_of_its_own_that_keeps_the_messages():
    story = Story()
    story.call([1], [2])
    story.call(None, answer(0, [], sampled_tokens=5))
    samples, accounting = told(story)
    assert reasons(samples) == ["main", "no_ids"]
    text = samples[1]
    assert (text.token_ids, text.loss_mask, text.logprobs, text.ids_grade) == (b"", b"", b"", IdsGrade.NONE)
    assert json.loads(bytes(text.messages))[-1] == {"role": "assistant", "content": "a0"}
    assert [(turn.start, turn.end, turn.masked_reason) for turn in text.turns] == [(0, 0, "no_ids")]
    assert accounting.masked == {"no_ids": 5}


def test_the_first_row_says_no_ids_rather_than_main():
    story = Story()
    story.call(None, answer(0, [], sampled_tokens=5), answer(1, [], sampled_tokens=6))
    assert reasons(told(story)[0]) == ["no_ids", "no_ids"]


def test_a_call_without_an_answer_is_no_row():
    story = Story()
    story.call([1], outcome=Outcome.ENGINE_ERROR)
    story.call([1])
    assert told(story)[0] == []


def test_a_choice_without_logprobs_joins_but_is_not_trained():
    story = Story()
    story.call([1], answer(0, [2, 3], logprobs=b"", logprobs_grade=LogprobsGrade.NONE))
    story.call([1, 2, 3], [4])
    (sample,), accounting = told(story)
    assert (list(sample.loss_mask), accounting.masked) == ([0, 0, 0, 1], {"no_logprobs": 2})
    assert sample.logprobs_grade == LogprobsGrade.PROCESSED


@pytest.mark.parametrize("hole", [math.nan, -math.inf, math.inf], ids=str)
def test_single_tokens_without_a_logprob_are_masked_alone(hole):
    story = Story()
    story.call([1], answer(0, [2, 3, 4], logprobs=pack_floats([-1.0, hole, -2.0])))
    (sample,), accounting = told(story)
    assert list(sample.loss_mask) == [0, 1, 0, 1]
    assert [math.isnan(value) for value in unpack_floats(sample.logprobs)] == [True, False, True, False]
    assert accounting.line() == "sampled 3 = trained 2 + 1 no_logprobs"


def test_tokens_that_the_engine_counted_but_never_told_are_masked():
    story = Story()
    story.call([1], answer(0, [2, 3], sampled_tokens=5))
    assert told(story)[1].line() == "sampled 5 = trained 2 + 3 no_ids"


def test_a_choice_without_ids_beside_one_with_ids():
    story = Story()
    story.call([1], [2], answer(1, [], sampled_tokens=2))
    samples, accounting = told(story)
    assert (reasons(samples), accounting.masked) == (["main", "no_ids"], {"no_ids": 2})


def test_the_weakest_grade_that_is_trained_is_the_rows_grade():
    story = Story()
    story.call([1], answer(0, [2], logprobs_grade=LogprobsGrade.RAW, ids_grade=IdsGrade.PINNED))
    story.call([1, 2], [3])
    (sample,), _ = told(story)
    assert (sample.ids_grade, sample.logprobs_grade) == (IdsGrade.PINNED, LogprobsGrade.RAW)


def test_version_spans_move_with_their_turn():
    story = Story()
    story.call([1, 1], answer(0, [2, 3], versions=[VersionSpan(version="7", start=0, end=2)]))
    story.call([1, 1, 2, 3, 9], answer(0, [4], versions=[VersionSpan(version="8", start=0, end=1)]))
    (sample,), _ = told(story)
    assert [(span.version, span.start, span.end) for span in sample.versions] == [("7", 2, 4), ("8", 5, 6)]


def test_problems_of_the_whole_path_are_named_once():
    story = Story()
    story.call([1], answer(0, [2], problems=["logprob_positive"]), problems=["terminated_without_done"])
    story.call([1, 2], answer(0, [3], problems=["logprob_positive"]))
    assert told(story)[0][0].problems == ["terminated_without_done", "logprob_positive"]


@pytest.mark.parametrize(
    ("messages", "said", "expected"),
    [
        pytest.param(b' [ {"a": 1.50} ] ', b'{"b":"\\u2028"}', b'[{"a": 1.50},{"b":"\\u2028"}]', id="nothing-respelt"),
        pytest.param(b"[]", b'{"b":1}', b'[{"b":1}]', id="no-messages"),
        pytest.param(b"null", b'{"b":1}', b'[{"b":1}]', id="null-messages"),
        pytest.param(b'[{"a":1}]', b"null", b'[{"a":1}]', id="no-answer"),
        pytest.param(b'"text"', b"null", b"[]", id="not-a-list"),
    ],
)
def test_the_conversation_is_the_request_and_the_answer(messages, said, expected):
    story = Story()
    story.call([1], answer(0, [2], message=msgspec.Raw(said)), messages=msgspec.Raw(messages))
    assert bytes(told(story)[0][0].messages) == expected


def test_calls_may_come_in_any_order():
    story = Story()
    story.call([1], [2])
    story.call([1, 2], [3], [4])
    assert build(rollout(), reversed(story.calls)) == build(rollout(), story.calls)


@st.composite
def stories(draw) -> Story:
    """Draw a rollout whose calls continue, fork, repeat, fail, lose evidence, in any mixture."""
    story, ends = Story(), [[1]]
    token = st.integers(0, 3)
    for _ in range(draw(st.integers(1, 14))):
        base = draw(st.sampled_from(ends))
        prompt = base[: draw(st.integers(1, len(base)))] if draw(st.integers(0, 4)) == 0 else list(base)
        prompt += draw(st.lists(token, max_size=2))
        answers = [draw(st.lists(token, max_size=3)) for _ in range(draw(st.integers(0, 3)))]
        choices = [draw_answer(draw, index, ids) for index, ids in enumerate(answers)]
        story.call(
            None if draw(st.integers(0, 7)) == 0 else prompt,
            *choices,
            rejected=draw(st.integers(0, 7)) == 0,
            outcome=draw(st.sampled_from([Outcome.COMPLETE] * 4 + list(Outcome))),
            delivery=draw(st.sampled_from([Delivery.CONFIRMED] * 4 + list(Delivery))),
            late=draw(st.integers(0, 9)) == 0,
        )
        ends += [prompt + ids for ids in answers]
    return story


def draw_answer(draw, index: int, ids: list[int]):
    logprobs = draw(st.lists(st.sampled_from([-0.5, -1.0, math.nan]), min_size=len(ids), max_size=len(ids)))
    grade = draw(st.sampled_from([LogprobsGrade.PROCESSED] * 3 + [LogprobsGrade.NONE]))
    unseen = draw(st.sampled_from([0, 0, 0, 2]))
    return answer(index, ids, logprobs=pack_floats(logprobs), logprobs_grade=grade, sampled_tokens=len(ids) + unseen)


@settings(max_examples=250, deadline=None)
@given(stories())
def test_every_sampled_token_is_trained_once_or_masked_by_name(story):
    samples, accounting = told(story)
    assert accounting.holds
    assert accounting.sampled == sum(choice.sampled_tokens for call in story.calls for choice in call.choices)
    assert accounting.trained == sum(sum(sample.loss_mask) for sample in samples)
    assert trained_more_than_once(samples) == []
    by_id = {call.call_id: call for call in story.calls}
    for sample in samples:
        check_row(sample, by_id)


def trained_more_than_once(samples: list[Sample]) -> list[tuple[str, int]]:
    trained = Counter((turn.call_id, turn.choice) for sample in samples for turn in sample.turns if turn.trained)
    return [node for node, times in trained.items() if times > 1]


def check_row(sample: Sample, calls) -> None:
    ids, values = unpack_ids(sample.token_ids), unpack_floats(sample.logprobs)
    assert len(ids) == len(values) == len(sample.loss_mask)
    assert [not math.isnan(value) for value in values] == [bool(target) for target in sample.loss_mask]
    spans = [(turn.start, turn.end) for turn in sample.turns]
    assert spans == sorted(spans)
    inside = {at for turn in sample.turns if turn.trained for at in range(turn.start, turn.end)}
    assert {at for at, target in enumerate(sample.loss_mask) if target} <= inside
    for turn in sample.turns if sample.branch_reason != "no_ids" else ():
        call = calls[turn.call_id]
        choice = call.choices[turn.choice]
        prompt = unpack_ids(PromptResolver(calls.values()).prompt_ids(call))
        assert ids[: turn.start] == prompt
        assert ids[turn.start : turn.end] == unpack_ids(choice.token_ids)
        assert turn.end - turn.start == count(choice.token_ids)
