"""The split of least error, against every possible split of small totals."""

import itertools
import random
from functools import partial

import pytest

from kvtool.errors import UsageError
from kvtool.policies.allocate.optimal import Optimal, convex_hull, curve_points
from kvtool.policies.allocate.problem import AllocationProblem, ErrorCurves


def interpolate(points, tokens):
    """Error on the straight lines between the points."""
    for (start, error), (end, below) in itertools.pairwise(points):
        if start <= tokens <= end:
            return error + (below - error) * (tokens - start) / (end - start)
    return points[-1][1]


def slow_hull(points, tokens):
    """The lowest line between any two points, at `tokens`."""
    lines = [error for place, error in points if place == tokens]
    for left, right in itertools.combinations(points, 2):
        if left[0] <= tokens <= right[0]:
            lines.append(interpolate([left, right], tokens))
    return min(lines)


def error_of(points, value, layer, tokens):
    return value(points[layer], tokens)


def least_sum(value, total, min_budgets, max_budgets):
    """The smallest sum of value(layer, tokens) over all splits of the total within the limits."""
    best = {0: 0.0}
    for layer, (low, high) in enumerate(zip(min_budgets, max_budgets, strict=True)):
        longer = {}
        for spent, error in best.items():
            for tokens in range(low, high + 1):
                new = error + value(layer, tokens)
                if spent + tokens <= total and new < longer.get(spent + tokens, float("inf")):
                    longer[spent + tokens] = new
        best = longer
    return best[total]


def random_room(rng, *, convex):
    layers, n = rng.randint(1, 4), rng.randint(12, 30)
    budgets = sorted(rng.sample(range(2, n), rng.randint(1, 4)))
    errors = []
    for _ in range(layers):
        if convex:
            scale = rng.choice([0.01, 1.0, 50.0])
            errors.append([scale * (n - budget) ** 2 / n for budget in budgets])
        else:
            errors.append([rng.random() for _ in budgets])
    min_budgets = [rng.randint(1, budgets[0]) for _ in range(layers)]
    total = rng.randint(layers * budgets[0], layers * n)
    return AllocationProblem(
        total=total,
        min_budgets=min_budgets,
        max_budgets=[n] * layers,
        curves=ErrorCurves(budgets, errors),
    )


@pytest.mark.parametrize("convex", [True, False])
def test_no_split_has_less_error(convex):
    rng = random.Random(convex)
    for _ in range(150):
        problem = random_room(rng, convex=convex)
        points = [
            curve_points(problem.curves, layer, problem.max_budgets[0])
            for layer in range(problem.layers)
        ]
        split = Optimal().split(problem)
        assert split.total == problem.total
        least = [problem.curves.budgets[0]] * problem.layers
        assert all(
            a <= x <= b for a, x, b in zip(least, split.tokens, problem.max_budgets, strict=True)
        )
        value = partial(error_of, points, interpolate if convex else slow_hull)
        got = sum(value(i, tokens) for i, tokens in enumerate(split.tokens))
        best = least_sum(value, problem.total, least, problem.max_budgets)
        assert got == pytest.approx(best, abs=1e-9)


def test_all_layers_but_one_stand_on_a_measured_budget():
    rng = random.Random(7)
    for _ in range(100):
        problem = random_room(rng, convex=False)
        corners = {*problem.curves.budgets, problem.max_budgets[0]}
        between = [t for t in Optimal().split(problem).tokens if t not in corners]
        assert len(between) <= 1


def test_a_layer_that_gains_nothing_stays_small():
    curves = ErrorCurves([10, 20, 40], [[0.9, 0.5, 0.1], [0.01, 0.009, 0.008]])
    problem = AllocationProblem(
        total=50, min_budgets=[8, 8], max_budgets=[1000, 1000], curves=curves
    )
    assert Optimal().split(problem).tokens == [40, 10]


def test_the_lower_limit_is_kept_where_it_binds():
    curves = ErrorCurves([10, 20, 40], [[0.9, 0.5, 0.1], [0.01, 0.009, 0.008]])
    problem = AllocationProblem(
        total=50, min_budgets=[16, 16], max_budgets=[1000, 1000], curves=curves
    )
    assert Optimal().split(problem).tokens == [34, 16]


def test_a_short_prompt_is_kept_whole_and_a_total_beyond_it_is_cut():
    curves = ErrorCurves([10, 20], [[0.9, 0.5], [0.8, 0.1]])
    for total in (16, 40):
        split = Optimal().split(
            AllocationProblem(total=total, min_budgets=[1, 1], max_budgets=[8, 8], curves=curves)
        )
        assert split.tokens == [8, 8]
        assert split.clamped == (total == 40)


def test_an_unmeasured_small_budget_is_refused():
    curves = ErrorCurves([10, 20], [[0.9, 0.5], [0.8, 0.1]])
    with pytest.raises(UsageError, match=r"9.5 tokens per layer are fewer than 10"):
        Optimal().split(
            AllocationProblem(total=19, min_budgets=[1, 1], max_budgets=[80, 80], curves=curves)
        )


def test_the_hull_skips_what_lies_above_it():
    assert convex_hull([(1, 9.0), (2, 8.9), (3, 1.0), (5, 2.0), (9, 0.0)]) == [
        (1, 9.0),
        (3, 1.0),
        (9, 0.0),
    ]
