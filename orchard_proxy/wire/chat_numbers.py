"""Which choice is which, where an engine numbers its choices well, badly or not at all.

Not a judge of what choices say. The invariant: in the end each choice has a number of its own, from 0 and small. The
engine's own number stands where it can; where it cannot, the choice gets the next free one, and the fault is named.
"""

from typing import Any

MOST = 1 << 16
"""No engine gives as many choices; beyond it a number is no number of a choice."""
_UNSETTLED = 1 << 40
"""Numbers from here on are given out while an answer is read, and settled when all of it is known."""


class ChoiceNumbers:
    """The numbering of one answer. `asked`: how many choices the request asks for, None when that is not known."""

    def __init__(self, asked: int | None) -> None:
        self.problems: list[str] = []
        self._limit = MOST if asked is None else min(asked, MOST)
        self._standing: set[int] = set()
        self._others: dict[tuple[str, int], int] = {}

    def numbered(self, source: dict[str, Any]) -> dict[str, Any]:
        """Return a whole answer or a chunk whose choices all have a number, no two of them the same."""
        choices = source.get("choices")
        if not isinstance(choices, list):
            return source
        taken: set[int] = set()
        out = [self._with_number(c, at, taken) if isinstance(c, dict) else c for at, c in enumerate(choices)]
        return {**source, "choices": out}

    def settled(self) -> dict[int, int]:
        """Return the final number of each choice whose own could not stand, by the one that `numbered` gave."""
        free = (number for number in range(MOST << 1) if number not in self._standing)
        return dict(zip(self._others.values(), free, strict=False))

    def _with_number(self, choice: dict[str, Any], position: int, taken: set[int]) -> dict[str, Any]:
        index = choice.get("index")
        if type(index) is int and 0 <= index < self._limit and index not in taken:
            self._standing.add(index)
            taken.add(index)
            return choice
        self._name(_problem(index, self._limit))
        number = self._other(repr(index)[:64], position, taken)
        taken.add(number)
        return {**choice, "index": number}

    def _other(self, spelt: str, position: int, taken: set[int]) -> int:
        """Return the number of the choice that is spelt so; of another one, where this body has that already."""
        number = self._others.setdefault((spelt, -1), _UNSETTLED + len(self._others))
        if number not in taken:
            return number
        return self._others.setdefault((spelt, position), _UNSETTLED + len(self._others))

    def _name(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def _problem(index: Any, limit: int) -> str:
    """Name what keeps a number from standing; one that could has been seen in the same body."""
    if index is None:
        return "choice_index_missing"
    if type(index) is not int:
        return "choice_index_not_int"
    if 0 <= index < limit:
        return "choice_index_repeated"
    return "choice_beyond_n" if 0 <= index < MOST else "choice_index_out_of_range"
