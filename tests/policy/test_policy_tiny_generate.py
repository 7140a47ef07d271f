import numpy as np
import pytest

from orchard_proxy.policy.tiny_generate import Generation
from orchard_proxy.policy.tiny_model import Model, State, seeded_weights
from orchard_proxy.policy.tiny_sampling import Sampler, SamplingParams
from orchard_proxy.policy.tiny_tokenizer import END_ID, START_ID, TinyTokenizer

TOKENIZER = TinyTokenizer()
MODEL = Model(seeded_weights(0, end_id=END_ID, rare_ids=TOKENIZER.rare_ids()))
PROMPT = TOKENIZER.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


def generate(params, text=None, *, end=True, seed=0):
    state = State()
    logits = MODEL.prefill(state, PROMPT)
    generation = Generation(
        model=MODEL,
        tokenizer=TOKENIZER,
        state=state,
        logits=logits,
        sampler=Sampler(params, np.random.default_rng(seed), PROMPT, processed=False),
        params=params,
        forced=[] if text is None else TOKENIZER.encode(text) + [END_ID] * end,
    )
    pieces = []
    while not generation.finished:
        pieces.append(generation.step())
    with pytest.raises(RuntimeError):
        generation.step()
    return pieces


def told(pieces):
    last = pieces[-1]
    return "".join(p.text for p in pieces), last.finish_reason, last.stop_reason


@pytest.mark.parametrize(
    ("text", "params", "expected"),
    [
        pytest.param("A b c.", {}, ("A b c.", "stop", None), id="end"),
        pytest.param("é 🦊 漢字", {}, ("é 🦊 漢字", "stop", None), id="unicode"),
        pytest.param(
            "The capital of France is", {"stop": ("France",)}, ("The capital of ", "stop", "France"), id="stop"
        ),
        pytest.param("The capital", {"stop": ("The",)}, ("", "stop", "The"), id="stop-first"),
        pytest.param("ab cd ef", {"stop": ("ef", "b c")}, ("a", "stop", "b c"), id="earliest-stop"),
        pytest.param("a<|im_start|>b", {}, ("ab", "stop", None), id="special-ids-are-no-text"),
        pytest.param("abc", {"stop": ("zzzzzz",)}, ("abc", "stop", None), id="held-text-comes-at-the-end"),
        pytest.param(
            "one two",
            {"stop": (" two",), "include_stop_str_in_output": True},
            ("one two", "stop", " two"),
            id="kept-stop",
        ),
    ],
)
def test_forced_text_ends(text, params, expected):
    pieces = generate(SamplingParams(max_tokens=500, **params), text)
    assert told(pieces) == expected


def test_a_cut_text_keeps_its_ids():
    pieces = generate(SamplingParams(max_tokens=500, stop=("France",)), "The capital of France is Paris.")
    ids = [p.scored.token for p in pieces]
    assert "France" in TOKENIZER.decode(ids)
    assert told(pieces)[0] == "The capital of "


def test_text_is_held_back_as_vllm_holds_it():
    """After "The capital" vLLM had let go of "The ca": one character less than the stop string is kept back."""
    pieces = generate(SamplingParams(max_tokens=500, stop=("France",)), "The capital of France.")
    seen, text = "", ""
    for piece in pieces[:-1]:
        text += piece.token_text
        seen += piece.text
        assert seen == text[: max(len(text) - 5, 0)]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_length_cuts_a_forced_text(limit):
    pieces = generate(SamplingParams(max_tokens=limit), "one two three four five")
    assert len(pieces) == limit
    assert told(pieces)[1] == "length"


def test_ignore_eos_goes_on_after_the_end():
    pieces = generate(SamplingParams(max_tokens=12, ignore_eos=True), "a")
    assert len(pieces) == 12
    assert END_ID in [p.scored.token for p in pieces]


def test_a_script_without_end_goes_on_freely():
    pieces = generate(SamplingParams(max_tokens=12, ignore_eos=True), "a", end=False)
    assert len(pieces) == 12


def test_stop_token_ids_and_min_tokens():
    free = generate(SamplingParams(max_tokens=8, ignore_eos=True))
    token = free[3].scored.token
    stopped = generate(SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=(token,)))
    assert (told(stopped)[1:], len(stopped)) == (("stop", token), 4)
    held = generate(SamplingParams(max_tokens=8, min_tokens=8, stop_token_ids=(token,)))
    assert END_ID not in [p.scored.token for p in held[:-1]]
    assert len(held) == 8


def test_the_same_seed_says_the_same():
    params = SamplingParams(max_tokens=40)
    one, two, other = (generate(params, seed=seed) for seed in (1, 1, 2))
    assert one == two
    assert one != other


def test_scores_are_those_of_the_ids_fed_again():
    pieces = generate(SamplingParams(max_tokens=150, ignore_eos=True))
    ids = [p.scored.token for p in pieces]
    rows = np.vstack(list(MODEL.extend(State(), PROMPT + ids))).astype(float)[len(PROMPT) - 1 : -1]
    again = rows[np.arange(len(ids)), ids] - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1)) - rows.max(1)
    np.testing.assert_allclose([p.scored.logprob for p in pieces], again, atol=1e-5)
    assert START_ID not in ids
