"""Every case that the first issue names has at least one test that is marked with its number."""

import re
from pathlib import Path

import pytest

LISTED = [
    *(1, 2, *range(4, 11), *range(12, 16), *range(20, 23), *range(24, 27), 28, 29, 38, 53, 54, 56, 59, 60, 68),
    *(70, 71, 72, 74, 79, *range(81, 87), 89, 91),
]
TESTS = Path(__file__).parent.parent
MARK = re.compile(r"^@pytest\.mark\.case\(([\d, ]+)\)$", re.MULTILINE)


def marked() -> set[int]:
    texts = [path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    return {int(number) for text in texts for found in MARK.findall(text) for number in found.split(",")}


@pytest.mark.parametrize("number", LISTED)
def test_the_case_has_a_test(number):
    assert number in marked()


def test_the_list_is_the_issues():
    assert len(LISTED) == len(set(LISTED)) == 41
    assert sorted(LISTED) == LISTED
