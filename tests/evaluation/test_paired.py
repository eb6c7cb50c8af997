"""The paired bootstrap against its exact distribution, and against a slow loop of its own draws."""

import math
import random
from fractions import Fraction

import pytest

from kvtool.evaluation.verdict import (
    LEAST_PAIRS,
    RESAMPLES,
    difference,
    excess,
    mean_of,
    ratio,
    unseen,
)


def plain(scores):
    return [(float(score), 1.0) for score in scores]


def exact_ends(differences: list[int], tail=Fraction(1, 40)) -> tuple[float, float]:
    """Percentiles of the mean of n draws from n whole numbers, by counting all n^n resamples."""
    n = len(differences)
    ways = {0: 1}
    for _ in range(n):
        longer: dict[int, int] = {}
        for total, count in ways.items():
            for each in differences:
                longer[total + each] = longer.get(total + each, 0) + count
        ways = longer
    assert sum(ways.values()) == n**n
    ends, seen = [], 0
    for share in (tail, 1 - tail):
        seen = 0
        for total in sorted(ways):
            seen += ways[total]
            if Fraction(seen, n**n) >= share:
                ends.append(total / n)
                break
    return ends[0], ends[1]


@pytest.mark.parametrize(
    "ours",
    [
        [1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1],
        [0, 1, 1, 0, 0, 1],
        [1] * 30 + [0] * 3,
        [0, 0, 1, 1, 1, 1, 0, 1, 0],
    ],
)
@pytest.mark.parametrize("losses", [0, 2])
def test_the_interval_is_that_of_all_resamples(ours, losses):
    full = [1] * (len(ours) - losses) + [0] * losses
    found = difference(plain(ours), plain(full))
    assert found.value == pytest.approx((sum(ours) - sum(full)) / len(ours))
    low, high = exact_ends([a - b for a, b in zip(ours, full, strict=True)])
    step = 1 / len(ours)  # 4000 draws may take the next percentile where two are nearly as likely
    assert abs(found.low - low) <= step * 1.001
    assert abs(found.high - high) <= step * 1.001
    assert found.low <= found.value <= found.high


def slow_interval(ours, full, of, link=float, times=20_000):
    drawn, found = random.Random(7), []
    for _ in range(times):
        picked = [drawn.randrange(len(ours)) for _ in ours]
        mine, theirs = (
            link(sum(part[i][0] for i in picked) / sum(part[i][1] for i in picked))
            for part in (ours, full)
        )
        found.append(of(mine, theirs))
    found.sort()
    return found[int(0.025 * times)], found[int(0.975 * times)]


DOCUMENTS = [(300.0, 127.0), (410.0, 131.0), (90.0, 61.0), (500.0, 211.0), (77.0, 29.0)] * 3
OURS = [(nll * (1.05 + 0.02 * (i % 4)), tokens) for i, (nll, tokens) in enumerate(DOCUMENTS)]


def test_samples_of_unequal_weight_are_those_of_a_perplexity():
    found = difference(OURS, DOCUMENTS, math.exp)
    whole = [
        math.exp(sum(a for a, _ in part) / sum(b for _, b in part)) for part in (OURS, DOCUMENTS)
    ]
    assert found.value == pytest.approx(whole[0] - whole[1])
    low, high = slow_interval(OURS, DOCUMENTS, lambda a, b: a - b, math.exp)
    width = high - low
    assert found.low == pytest.approx(low, abs=0.08 * width)
    assert found.high == pytest.approx(high, abs=0.08 * width)


def test_speeds_are_divided():
    found = ratio(OURS, DOCUMENTS)
    low, high = slow_interval(OURS, DOCUMENTS, lambda a, b: a / b)
    assert found.value == pytest.approx(mean_of(OURS) / mean_of(DOCUMENTS))
    assert found.low == pytest.approx(low, abs=0.08 * (high - low))
    assert found.high == pytest.approx(high, abs=0.08 * (high - low))


def test_what_is_hard_for_both_cancels():
    """Scores from 0 to 1 that are 0.01 apart on every sample: paired, the interval has no width."""
    full = [i / 20 for i in range(20)]
    found = difference(plain([score - 0.01 for score in full]), plain(full))
    assert (found.low, found.high) == pytest.approx((-0.01, -0.01))


def test_an_excess_subtracts_one_difference_from_another_over_the_same_draws():
    ours, theirs = plain([3, 1, 4, 1, 5, 9, 2]), plain([2, 7, 1, 8, 2, 8, 1])
    zero = plain([0] * 7)
    direct = difference(ours, theirs)
    assert excess((ours, zero), (theirs, zero)) == direct
    assert excess((ours, theirs), (zero, zero)) == direct
    assert excess((zero, theirs), (zero, ours)) == direct
    assert excess((ours, theirs), (ours, theirs)).value == 0
    e = excess((plain([1] * 7), zero), (plain([2] * 7), zero), math.exp)  # e - 1 - (e^2 - 1)
    assert (e.value, e.low) == pytest.approx((math.e - math.e**2,) * 2)


def test_draws_follow_from_the_number_of_samples_alone():
    first, again = (difference(OURS, DOCUMENTS) for _ in range(2))
    assert first == again
    scaled = [(2 * total, weight) for total, weight in OURS]
    assert difference(scaled, DOCUMENTS).low != first.low


def test_many_samples_are_drawn_in_parts():
    n = 3000  # a block of draws holds 349 resamples
    ours = [float(i % 10 != 0) for i in range(n)]
    found = difference(plain(ours), plain([1.0] * n))
    spread = 1.96 * math.sqrt(0.1 * 0.9 / n)
    assert RESAMPLES * n > 2**20
    assert found.low == pytest.approx(-0.1 - spread, abs=0.15 * spread)
    assert found.high == pytest.approx(-0.1 + spread, abs=0.15 * spread)


def test_few_pairs_have_no_interval():
    ours, full = plain([0] * LEAST_PAIRS), plain([1] * LEAST_PAIRS)
    assert difference(ours, full).low == -1
    few = difference(ours[1:], full[1:])
    assert (few.value, few.low, few.high) == (-1, None, None)
    assert 2 * 0.5**LEAST_PAIRS < 0.05 < 2 * 0.5 ** (LEAST_PAIRS - 1)  # of a sign test
    with pytest.raises(ValueError, match="length"):
        difference(ours, full[1:])


def test_scores_beyond_all_numbers_have_no_interval():
    endless = [(1e6, 1.0)] * 6
    found = difference(endless, DOCUMENTS[:6], lambda nll: math.inf if nll > 700 else math.exp(nll))
    assert (found.value, found.low) == (math.inf, None)


def test_a_loss_that_nobody_saw():
    for n in [1, 11, 59]:
        assert (1 - unseen(n)) ** n == pytest.approx(0.05)
