import random
import time

import pytest
from storybook import Story, stored_tokens

from orchard_proxy.assemble.forest import Forest, Sampled
from orchard_proxy.assemble.prompts import PromptResolver
from orchard_proxy.errors import BrokenPromptError
from orchard_proxy.schema.packed import pack_ids, unpack_ids


def parents(story: Story) -> list[tuple[str | None, int | None]]:
    return [(call.parent_call_id, call.parent_choice) for call in story.calls]


def test_a_call_extends_the_call_whose_prompt_and_answer_it_begins_with():
    story = Story()
    story.call([1, 2], [3, 4])
    second = story.call([1, 2, 3, 4, 9], [5])
    assert (second.parent_call_id, second.parent_choice) == ("c0", 0)
    assert second.prompt.shared_tokens == 4
    assert unpack_ids(second.prompt.new_ids) == [9]


def test_the_prompt_may_be_exactly_the_parent_and_nothing_more():
    story = Story()
    story.call([1], [2])
    again = story.call([1, 2], [3])
    assert (again.parent_call_id, again.prompt.shared_tokens, again.prompt.new_ids) == ("c0", 2, b"")


def test_the_longest_parent_wins_over_the_earlier_one():
    story = Story()
    story.call([1], [2])
    story.call([1, 2, 3], [4])
    story.call([1], [2, 3])
    assert story.call([1, 2, 3, 4, 5], [6]).parent_call_id == "c1"


def test_among_equal_parents_the_earliest_committed_wins():
    story = Story()
    story.call([1], [2])
    story.call([1], [2])
    assert story.call([1, 2, 3], [4]).parent_call_id == "c0"


def test_equal_ends_at_another_border_between_prompt_and_answer_are_still_the_earliest():
    story = Story()
    story.call([1, 2], [3])
    story.call([1], [2, 3])
    assert parents(story)[1] == (None, None)
    assert story.call([1, 2, 3, 4], [5]).parent_call_id == "c0"


def test_each_choice_is_a_node():
    story = Story()
    story.call([1], [2], [3], [2])
    assert story.call([1, 3, 7], [8]).parent_choice == 1
    assert story.call([1, 2, 7], [8]).parent_choice == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(([1], [198, 198]), [1, 271, 5], id="two-newlines-against-one-token"),
        pytest.param(([1], [2, 3]), [1, 2], id="answer-cut"),
        pytest.param(([1, 2], [3]), [1, 9, 3, 4], id="prompt-changed"),
        pytest.param(([1, 2], [3]), [0, 1, 2, 3, 4], id="shifted"),
        pytest.param(([256], [1]), [1, 256, 1], id="byte-patterns-at-odd-offsets"),
    ],
)
def test_another_token_is_another_branch(first, second):
    story = Story()
    story.call(first[0], first[1])
    assert story.call(second, [7]).parent_call_id is None


def test_an_empty_answer_is_no_node():
    story = Story()
    story.call([1, 2], [])
    assert story.call([1, 2, 3], [4]).parent_call_id is None


def test_a_root_is_stored_by_what_it_shares_with_a_recent_call():
    story = Story()
    story.call(list(range(100)), [500, 501, 502])
    drifted = story.call([*range(100), 500, 900], [1])
    assert (drifted.parent_call_id, drifted.prompt.base_call_id, drifted.prompt.base_choice) == (None, "c0", 0)
    assert drifted.prompt.shared_tokens == 101
    other = story.call([*range(60), 7], [1])
    assert (other.prompt.shared_tokens, other.prompt.base_choice) == (60, None)


def test_a_rejected_call_is_stored_compactly_but_never_joined():
    story = Story()
    story.call([1, 2], [3])
    rejected = story.call([1, 2, 3, 4], [5], rejected=True)
    assert (rejected.parent_call_id, rejected.prompt.base_call_id) == (None, "c0")
    assert story.call([1, 2, 3, 4, 5, 6], [7]).parent_call_id == "c0"


def test_interleaved_chains_find_their_own_parents():
    story = Story()
    ends = [story_ids(story, chain, None) for chain in range(6)]
    for _ in range(5):
        ends = [story_ids(story, chain, end) for chain, end in enumerate(ends)]
    assert parents(story)[6:] == [(f"c{n}", 0) for n in range(30)]


def story_ids(story: Story, chain: int, end: list[int] | None) -> list[int]:
    prompt = [chain, 77, 78] if end is None else [*end, 79]
    sampled = [len(prompt), chain]
    story.call(prompt, sampled)
    return prompt + sampled


def test_two_hundred_turns_cost_two_hundred_turns_of_storage():
    story, history, unique = Story(), list(range(500)), 500
    for turn in range(200):
        sampled = [turn * 7 + n for n in range(20)]
        story.call(history, sampled)
        history = [*history, *sampled, *range(turn, turn + 30)]
        unique += 50
    assert [parent for parent, _ in parents(story)[1:]] == [f"c{n}" for n in range(199)]
    assert stored_tokens(story.calls) <= 1.2 * unique


def test_a_template_that_drops_the_last_thoughts_still_costs_linear_storage():
    story, history, unique = Story(), list(range(500)), 500
    for turn in range(100):
        thought, said = [9000 + turn] * 40, [8000 + turn] * 20
        story.call(history, thought + said)
        history = [*history, *said, turn, turn]
        unique += 62
    assert all(call.parent_call_id is None for call in story.calls)
    assert stored_tokens(story.calls) <= 1.4 * unique


def test_prompts_come_back_from_their_references():
    draw = random.Random(5)
    story, prompts = Story(), []
    for _ in range(300):
        prompt = list(draw.choice(prompts)) if prompts and draw.random() < 0.9 else [draw.randrange(5)]
        prompt = prompt[: draw.randrange(1, len(prompt) + 1)] + [draw.randrange(4) for _ in range(draw.randrange(4))]
        sampled = [[draw.randrange(4) for _ in range(draw.randrange(3))] for _ in range(draw.randrange(1, 3))]
        story.call(prompt, *sampled, rejected=draw.random() < 0.1)
        prompts += [prompt, *(prompt + ids for ids in sampled)]
        assert unpack_ids(PromptResolver(story.calls).prompt_ids(story.calls[-1])) == prompt


def test_a_forest_built_again_places_alike():
    def build() -> list[object]:
        draw, forest, out, ids = random.Random(9), Forest(), [], [1, 2, 3]
        for n in range(120):
            out.append(forest.add(f"c{n}", pack_ids(ids), [Sampled(0, pack_ids([n % 5]))]))
            ids = [*ids[: draw.randrange(1, len(ids) + 1)], n % 5, draw.randrange(3)]
        return out

    assert build() == build()


@pytest.mark.parametrize(
    "damage",
    [pytest.param("missing", id="missing"), pytest.param("later", id="later"), pytest.param("short", id="short")],
)
def test_a_reference_that_leads_nowhere_is_an_error(damage):
    story = Story()
    story.call([1, 2], [3])
    story.call([1, 2, 3, 4], [5])
    calls = list(story.calls)
    if damage == "missing":
        del calls[0]
    elif damage == "later":
        calls[0] = replace(calls[0], commit_seq=9)
    else:
        calls[0] = replace(calls[0], choices=[])
    with pytest.raises(BrokenPromptError, match="c1"):
        PromptResolver(calls).prompt_ids(calls[-1])


def replace(call, **over):
    from msgspec.structs import replace as swap  # noqa: PLC0415

    return swap(call, **over)


def test_placing_costs_no_more_with_many_calls_of_equal_length():
    prompt = pack_ids(range(20_000))
    forest = Forest()
    alone = spent(lambda: forest.add("first", prompt, [Sampled(0, pack_ids([1]))]))
    for n in range(2_000):
        forest.add(f"c{n}", pack_ids([n, 5]), [Sampled(0, pack_ids([1, 2]))])
    crowded = spent(lambda: forest.add("last", prompt, [Sampled(0, pack_ids([1]))]))
    assert crowded < 20 * alone + 0.002


def spent(work) -> float:
    best = 1e9
    for _ in range(5):
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
    return best
