"""The one search, against a plain loop."""

import pytest

from kvtool.errors import UsageError
from kvtool.planning.search import largest_that_fits, least_allowed


def test_the_largest_number_within_a_limit_is_that_of_a_plain_search():
    costs = (lambda n: n, lambda n: 3 * n + 2, lambda n: n * n // 7, lambda n: 10 * (n // 8))
    for limit, least, most in [
        (0, 1, 9),
        (7, 1, 9),
        (29, 1, 9),
        (50, 1, 9),
        (10**4, 1, 10**3),
        (5, 5, 5),
    ]:
        for cost in costs:
            wanted = max((n for n in range(least, most + 1) if cost(n) <= limit), default=None)
            for steady in (False, True):
                found = largest_that_fits(cost, limit, least, most, steady=steady)
                assert found == wanted


@pytest.mark.parametrize("least", range(1, 12))
def test_the_least_that_is_allowed_is_that_of_a_plain_loop(least):
    def attempt(number):
        if number < least:
            raise UsageError("too small")

    for most in range(2, 12):
        assert least_allowed(attempt, 2, most) == min(max(least, 2), most)
