from itertools import combinations

import pytest

from orchard_proxy.runner import passk


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_it_is_the_share_of_draws_that_hold_one_that_passed(n):
    for passed in range(n + 1):
        for k in range(1, n + 1):
            draws = list(combinations([True] * passed + [False] * (n - passed), k))
            assert passk.pass_at_k(n, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_tasks_with_fewer_attempts_than_k_do_not_count():
    assert passk.mean_pass_at_k([(4, 2), (1, 1), (0, 0)], 1) == pytest.approx(0.75)
    assert passk.mean_pass_at_k([(4, 2), (1, 1)], 4) == 1.0
    assert passk.mean_pass_at_k([(1, 1)], 2) is None


@pytest.mark.parametrize(("n", "passed", "k"), [(4, 5, 1), (4, 1, 5), (4, 1, 0), (0, 0, 1)])
def test_what_makes_no_sense_is_refused(n, passed, k):
    with pytest.raises(ValueError, match="pass@"):
        passk.pass_at_k(n, passed, k)


@pytest.mark.parametrize(("n", "ks"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])])
def test_shown_are_powers_of_two_and_n(n, ks):
    assert passk.ks(n) == ks
