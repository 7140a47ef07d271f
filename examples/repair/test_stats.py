import unittest

from stats import mean, median


class TestStats(unittest.TestCase):
    def test_mean(self):
        assert mean([1, 2, 6]) == 3

    def test_median_of_an_odd_number(self):
        assert median([9, 1, 4]) == 4

    def test_median_of_an_even_number(self):
        assert median([3, 1]) == 2
        assert median([4, 1, 3, 2]) == 2.5
