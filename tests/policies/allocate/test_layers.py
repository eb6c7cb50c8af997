"""Splits over layers: the worked numbers of each paper's formula, and their edges."""

import itertools
import math
import random

import pytest

from kvtool.errors import UsageError
from kvtool.policies.allocate.d2o import D2O, D2OExp, D2OReciprocal, normalise
from kvtool.policies.allocate.problem import AllocationProblem
from kvtool.policies.allocate.pyramid import Pyramid, pyramid_line
from kvtool.policies.allocate.uniform import Uniform
from kvtool.policies.spelling import check_numbers

F = [2.0, 5.0, 300.0, 600.0]


def d2o_room(share):
    return AllocationProblem(
        total=int(4000 * share),
        min_budgets=[16] * 4,
        max_budgets=[1000] * 4,
        variance=F,
        largest=[999] * 4,
    )


@pytest.mark.parametrize(
    ("allocator", "expected"),
    [
        (D2O(norm="raw"), [732, 36, 16, 16]),
        (D2O(), [243, 243, 180, 134]),
        (D2OExp(), [243, 243, 180, 134]),
        (D2O(norm="minmax"), [269, 268, 164, 99]),
        (D2OReciprocal(), [549, 219, 16, 16]),
        (Uniform(), [200] * 4),
    ],
)
def test_d2o_at_a_fifth(allocator, expected):
    assert allocator.split(d2o_room(0.2)).tokens == expected


@pytest.mark.parametrize(
    ("allocator", "expected"),
    [
        (D2O(norm="raw"), [1000, 1000, 1000, 200]),
        (D2O(norm="minmax"), [1000, 1000, 747, 453]),
        (D2O(), [973, 970, 722, 535]),
    ],
)
def test_d2o_at_four_fifths_fills_layers_up_to_the_prompt(allocator, expected):
    assert allocator.split(d2o_room(0.8)).tokens == expected


def test_temperature_brings_layers_closer():
    def spread(temperature):
        tokens = D2O(temperature=temperature).split(d2o_room(0.2)).tokens
        return max(tokens) - min(tokens)

    assert spread(0.2) > spread(1.0) > spread(5.0) > 0


def test_the_length_norm_is_1_where_one_token_draws_all():
    tokens = 512
    sums = [float(tokens)] + [0.0] * (tokens - 1)
    variance = sum((value - 1) ** 2 for value in sums) / tokens
    assert normalise([variance], [tokens - 1], "length") == [1.0]


def test_layers_without_variance_do_not_break_the_reciprocal():
    problem = AllocationProblem(
        total=100, min_budgets=[1] * 3, max_budgets=[99] * 3, variance=[0.0, 2.0, 4.0]
    )
    assert D2OReciprocal().split(problem).tokens == [40, 40, 20]
    flat = AllocationProblem(
        total=99, min_budgets=[1] * 3, max_budgets=[99] * 3, variance=[0.0] * 3
    )
    assert D2OReciprocal().split(flat).tokens == [33] * 3


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_that_means_nothing_is_refused(temperature):
    with pytest.raises(UsageError, match="temperature must be"):
        check_numbers(D2O(temperature=temperature))


def test_pyramid_as_worked_out_by_hand():
    assert pyramid_line(4, 128, 4096, window=8, beta=20) == [234, 158, 82, 6]
    problem = AllocationProblem(total=4 * 128, min_budgets=[1] * 4, max_budgets=[4096] * 4)
    assert Pyramid(window=8).split(problem).tokens == [242, 166, 90, 14]


def test_pyramid_stops_at_the_prompt():
    line = pyramid_line(4, 128, 240, window=8, beta=20)
    assert (line[0], line[-1]) == (232, 8)  # 240 - 8, and what keeps the mean at 120
    assert sum(line) == pytest.approx(480)


@pytest.mark.parametrize("tokens", [129, 200, 239])
def test_pyramid_is_uniform_for_prompts_of_less_than_twice_the_budget(tokens):
    problem = AllocationProblem(total=4 * 128, min_budgets=[1] * 4, max_budgets=[tokens] * 4)
    assert Pyramid(window=8).split(problem).tokens == [128] * 4


def test_pyramid_of_one_layer_and_of_a_budget_within_the_window():
    assert Pyramid().split(
        AllocationProblem(total=50, min_budgets=[1], max_budgets=[99])
    ).tokens == [50]
    small = AllocationProblem(total=12, min_budgets=[1] * 3, max_budgets=[99] * 3)
    assert Pyramid(window=8).split(small).tokens == [4, 4, 4]


@pytest.mark.parametrize("beta", [0.5, math.inf, math.nan])
def test_a_pyramid_upside_down_is_refused(beta):
    with pytest.raises(UsageError, match="beta must be"):
        check_numbers(Pyramid(beta=beta))


def test_every_split_spends_the_total_within_the_limits():
    rng = random.Random(0)
    allocators = [Uniform(), D2O(), D2O(norm="raw"), D2O(norm="minmax"), D2OReciprocal(), Pyramid()]
    for allocator, _ in itertools.product(allocators, range(150)):
        layers, n = rng.randint(1, 12), rng.randint(20, 3000)
        least = rng.randint(1, 20)
        total = rng.randint(layers * least, layers * n)
        variance = [rng.choice([0.0, rng.random(), rng.expovariate(1) * n]) for _ in range(layers)]
        problem = AllocationProblem(
            total=total,
            min_budgets=[least] * layers,
            max_budgets=[n] * layers,
            window=rng.choice([None, 8, 32]),
            variance=variance,
            largest=[n - 1] * layers,
        )
        split = allocator.split(problem)
        assert (split.total, split.clamped) == (total, False)
        assert all(least <= tokens <= n for tokens in split.tokens)
