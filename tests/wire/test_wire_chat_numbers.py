from typing import Any

import pytest

from orchard_proxy.wire.chat import ChoiceNumbers


def final(bodies: list[list[Any]], asked: int | None = 8) -> tuple[list[list[int]], list[str]]:
    """Number bodies of choices with these indexes; return the final numbers and the problems."""
    numbers = ChoiceNumbers(asked)
    made = [numbers.numbered({"choices": [{"index": index} for index in body]}) for body in bodies]
    settled = numbers.settled()
    return [[settled.get(c["index"], c["index"]) for c in body["choices"]] for body in made], numbers.problems


@pytest.mark.parametrize(
    ("bodies", "expected"),
    [
        ([[0, 1], [1], [0]], [[0, 1], [1], [0]]),
        ([[3]], [[3]]),
        ([[-1], [0], [-1]], [[1], [0], [1]]),
        ([[-1], [-2], [-1], [1]], [[0], [2], [0], [1]]),
        ([[0, 0], [0, 0]], [[0, 1], [0, 1]]),
        ([[-1, -1, -1]], [[0, 1, 2]]),
        ([["0"], [0], [0.0], [True], ["0"]], [[1], [0], [2], [3], [1]]),
        ([[None], [None]], [[0], [0]]),
        ([[{}], [[]], [{}]], [[0], [1], [0]]),
        ([[2**31], [2**70]], [[0], [1]]),
    ],
    ids=str,
)
def test_each_choice_has_a_small_number_of_its_own(bodies: list[list[Any]], expected: list[list[int]]) -> None:
    assert final(bodies)[0] == expected


def test_problems_are_named_once() -> None:
    assert final([[0, 0, 9], [-1], ["a"], [None], [0, 0]])[1] == [
        "choice_index_repeated",
        "choice_beyond_n",
        "choice_index_out_of_range",
        "choice_index_not_int",
        "choice_index_missing",
    ]


def test_without_a_known_n_small_numbers_stand() -> None:
    assert final([[5], [2**20]], None) == ([[5], [0]], ["choice_index_out_of_range"])


@pytest.mark.parametrize("source", [{}, {"choices": None}, {"choices": 5}, {"choices": []}, {"choices": [None, "x"]}])
def test_what_has_no_choices_is_left(source: dict[str, Any]) -> None:
    assert ChoiceNumbers(1).numbered(source) == source
