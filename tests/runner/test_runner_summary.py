import json

import msgspec
import pytest
from test_runner_plan import AGENT, DONE, INFRA, PLAN, POLICY, RUNNING, SLOTS, rollout

from orchard_proxy.runner import summary
from orchard_proxy.runner.control import ListedCall
from orchard_proxy.runner.summary import Seen


def seen(slot, attempt, how, reward=None, tokens=()):
    listed = msgspec.structs.replace(rollout(slot, attempt, how), reward=reward, started_s=10.0, finished_s=12.0)
    calls = [ListedCall(outcome="complete", prompt_tokens=100, sampled_tokens=[count]) for count in tokens]
    return Seen(rollout=listed, calls=calls)


def build(*rows, interrupted=False):
    return summary.build(PLAN, SLOTS, rows, interrupted=interrupted, wall_s=1.0, export="orchard export")


def test_the_last_attempt_counts_and_all_tokens_do():
    told = build(
        seen(SLOTS[0], 2, DONE, reward=1.0, tokens=[5]),
        seen(SLOTS[0], 1, INFRA, tokens=[7]),
        seen(SLOTS[1], 1, DONE, reward=0.0, tokens=[1, 1]),
        seen(SLOTS[2], 1, AGENT, reward=0.0),
        seen(SLOTS[3], 1, AGENT, reward=0.0),
    )
    first, second = told.tasks
    assert (first.rewards, first.totals.passed, first.totals.attempts) == ([1.0, 0.0], 1, 3)
    assert first.totals.pass_at_k == pytest.approx({"1": 0.5, "2": 1.0})
    assert (first.totals.sampled_tokens, first.totals.prompt_tokens) == (14, 400)
    assert second.totals.failures == {"c": 2}
    assert told.total.pass_at_k == pytest.approx({"1": 0.25, "2": 0.5})
    assert (told.total.reward_mean, told.total.finished, told.total.duration_s_mean) == (0.25, 4, 2.0)
    assert told.ok
    assert json.loads(summary.as_json(told))["ok"] is True


@pytest.mark.parametrize("how", [INFRA, POLICY, RUNNING, None])
def test_a_sample_without_an_end_of_its_own_is_work_that_failed(how):
    rows = [seen(slot, 1, DONE, reward=1.0) for slot in SLOTS[:3]]
    told = build(*rows, *([seen(SLOTS[3], 1, how)] if how else []))
    assert (told.ok, told.total.finished) == (False, 3)
    assert told.tasks[1].rewards == [1.0, None]
    assert told.tasks[1].totals.pass_at_k == {"1": 1.0}, "a rollout without a reward is no attempt that failed"


def test_nothing_at_all():
    told = build()
    assert (told.total.reward_mean, told.total.pass_at_k, told.total.duration_s_mean) == (None, {}, None)
    assert told.tasks[0].rollout_ids == [None, None]
