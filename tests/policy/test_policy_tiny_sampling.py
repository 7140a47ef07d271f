import numpy as np
import pytest

from orchard_proxy.policy.tiny_sampling import Sampler, SamplingParams, best, log_softmax

LOGITS = np.log(np.array([0.5, 0.25, 0.15, 0.07, 0.03], np.float32))
ALL = {0, 1, 2, 3, 4}


def drawn(params, logits=LOGITS, times=600, prompt=(), processed=False):
    sampler = Sampler(params, np.random.default_rng(3), list(prompt), processed=processed)
    return [sampler.pick(logits, forced=None, banned=[], top=0) for _ in range(times)]


@pytest.mark.parametrize(
    ("params", "possible"),
    [
        pytest.param(SamplingParams(), ALL, id="plain"),
        pytest.param(SamplingParams(temperature=0), {0}, id="greedy"),
        pytest.param(SamplingParams(top_k=2), {0, 1}, id="top_k"),
        pytest.param(SamplingParams(top_k=-1), ALL, id="top_k-off"),
        pytest.param(SamplingParams(top_k=9), ALL, id="top_k-more-than-there-are"),
        pytest.param(SamplingParams(top_p=0.6), {0, 1}, id="top_p"),
        pytest.param(SamplingParams(top_p=1e-9), {0}, id="top_p-keeps-the-best"),
        pytest.param(SamplingParams(min_p=0.29), {0, 1, 2}, id="min_p"),
        pytest.param(SamplingParams(logit_bias={4: 100.0}), {4}, id="bias-up"),
        pytest.param(SamplingParams(logit_bias={0: -100.0}), {1, 2, 3, 4}, id="bias-down"),
    ],
)
def test_what_can_be_drawn(params, possible):
    assert {scored.token for scored in drawn(params)} == possible


def test_frequencies_follow_the_temperature():
    shares = np.bincount([s.token for s in drawn(SamplingParams(temperature=2.0), times=6000)], minlength=5) / 6000
    expected = np.exp(log_softmax(LOGITS.astype(float) / 2))
    np.testing.assert_allclose(shares, expected, atol=0.03)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_said_ids_become_rarer(name):
    first, second = drawn(SamplingParams(**{"temperature": 0, name: 2.0}), times=2)
    assert (first.token, second.token) == (0, 1)


def test_the_prompt_is_penalised_for_repetition():
    logits = np.array([2.0, 1.9, 0, 0, 0], np.float32)
    params = SamplingParams(temperature=0, repetition_penalty=1.5)
    assert drawn(params, logits, times=1, prompt=[0])[0].token == 1


def test_raw_logprobs_are_the_models_own_and_processed_those_drawn_from():
    params = SamplingParams(temperature=0.5, top_k=2)
    raw, processed = drawn(params, times=1)[0], drawn(params, times=1, processed=True)[0]
    assert raw.token == processed.token
    assert raw.logprob == pytest.approx(float(LOGITS[raw.token]), abs=1e-6)
    squares = np.array([0.5, 0.25]) ** 2
    assert processed.logprob == pytest.approx(float(np.log(squares[processed.token] / squares.sum())), abs=1e-6)


def test_a_forced_id_is_scored_and_a_banned_one_not_drawn():
    sampler = Sampler(SamplingParams(temperature=0), np.random.default_rng(0), [], processed=False)
    assert sampler.pick(LOGITS, forced=3, banned=[], top=0).logprob == pytest.approx(np.log(0.07), abs=1e-6)
    assert sampler.pick(LOGITS, forced=None, banned=[0], top=0).token == 1


def test_an_impossible_forced_id_gets_the_floor():
    sampler = Sampler(SamplingParams(top_k=1), np.random.default_rng(0), [], processed=True)
    assert sampler.pick(LOGITS, forced=4, banned=[], top=2).logprob == -9999.0


def test_alternatives_come_best_first():
    logprobs = log_softmax(LOGITS.astype(float)[::-1].copy())
    assert [token for token, _ in best(logprobs, 3)] == [4, 3, 2]
    assert best(logprobs, 0) == ()


def test_logprobs_are_float32_values():
    scored = drawn(SamplingParams(), times=1)[0]
    assert float(np.float32(scored.logprob)) == scored.logprob
