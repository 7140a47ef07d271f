"""Which Python versions a harness runs on: `>=3.10,<3.14`.

Minor versions only, because a harness's wheels depend on no more than that. Not a parser of all that packaging allows.
"""

import operator
import re
from collections.abc import Callable

_PART = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d+)\.(\d+)")
_OPERATORS: dict[str, Callable[[tuple[int, int], tuple[int, int]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def is_valid(spec: str) -> bool:
    """Whether every part of the specification is understood."""
    return all(_PART.fullmatch(part.strip()) for part in spec.split(","))


def satisfied(spec: str, version: tuple[int, int]) -> bool:
    """Whether a version (major, minor) fits a valid specification."""
    parts = [match for part in spec.split(",") if (match := _PART.fullmatch(part.strip()))]
    return all(_OPERATORS[part[1]](version, (int(part[2]), int(part[3]))) for part in parts)
