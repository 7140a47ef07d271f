import itertools
import time

import numpy as np
import pytest

from orchard_proxy.policy.tiny_engine import TinyEngine
from orchard_proxy.policy.tiny_model import BLOCK, SHAPES, VOCAB, WINDOW, Model, State, seeded_weights

MODEL = Model(seeded_weights(0, end_id=2, rare_ids=[0, 1]))
IDS = np.random.default_rng(1).integers(0, VOCAB, 700).tolist()


def logits_of(ids, cuts=()):
    state = State()
    bounds = [0, *cuts, len(ids)]
    parts = [MODEL.extend(state, ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return np.vstack([block for part in parts for block in part])


@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param(list(range(1, 700)), id="one-by-one"),
        pytest.param([1, 2, 3, 5, 63, 64, 65, 127, 128, 129, 300], id="odd"),
        pytest.param([BLOCK * 2], id="blocks"),
    ],
)
def test_pieces_of_any_size_give_what_one_piece_gives(cuts):
    np.testing.assert_allclose(logits_of(IDS, cuts), logits_of(IDS), atol=5e-6)


def test_a_prefill_ends_in_the_state_that_steps_reach():
    prefilled, stepped = State(), State()
    last = MODEL.prefill(prefilled, IDS)
    for token in IDS:
        reached = MODEL.step(stepped, token)
    np.testing.assert_allclose(last, reached, atol=5e-6)
    np.testing.assert_allclose(MODEL.step(prefilled, 7), MODEL.step(stepped, 7), atol=5e-6)


def test_nothing_depends_on_later_ids():
    changed = [*IDS[:400], *reversed(IDS[400:])]
    np.testing.assert_allclose(logits_of(changed)[:400], logits_of(IDS)[:400], atol=5e-6)


def test_a_word_far_outside_the_window_is_seen():
    other = [*IDS[:10], (IDS[10] + 1) % VOCAB, *IDS[11:]]
    assert len(IDS) - 10 > 5 * WINDOW
    assert np.abs(logits_of(other)[-1] - logits_of(IDS)[-1]).max() > 1e-4


def test_copies_of_a_state_go_their_own_ways():
    state = State()
    MODEL.prefill(state, IDS)
    twin = state.copy()
    first = MODEL.step(state, 5)
    MODEL.step(state, 6)
    np.testing.assert_array_equal(MODEL.step(twin, 5), first)


def test_the_seed_makes_the_weights():
    same, other = (seeded_weights(seed, end_id=2, rare_ids=[]) for seed in (0, 1))
    assert {name: array.shape for name, array in same.items()} == SHAPES
    assert all(array.dtype == np.float32 for array in same.values())
    np.testing.assert_array_equal(same["wq"], MODEL.weights["wq"])
    assert not np.array_equal(same["wq"], other["wq"])


def test_the_cost_of_a_long_prompt_is_linear():
    def seconds(tokens: int) -> float:
        ids = (IDS * (tokens // len(IDS) + 1))[:tokens]
        start = time.process_time()
        for _ in MODEL.extend(State(), ids):
            pass
        return time.process_time() - start

    seconds(4_000)
    assert seconds(40_000) < 25 * seconds(4_000) + 0.2


async def test_fifty_thousand_tokens_are_quick():
    """Bounds of the issue (0.5 s, and 2 s with prompt_logprobs), in CPU time: the machine may be busy."""
    engine = TinyEngine(seed=0, processed_logprobs=False, delay_s=0)
    ids = (IDS * 72)[:50_000]
    start = time.process_time()
    engine.model.prefill(State(), ids)
    prefilled = time.process_time()
    rows = await engine.prompt_logprobs(ids, 0)
    scored = time.process_time()
    engine.close()
    assert len(rows) == len(ids) - 1
    assert prefilled - start < 0.5
    assert scored - prefilled < 4.0
