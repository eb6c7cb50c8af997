"""The split of least loss, against every possible split of small totals."""

import itertools
import random
from functools import partial

import pytest

from kvtool.errors import UsageError
from kvtool.policies.allocate.optimal import (
    Optimal,
    best_heads,
    best_split,
    curve_points,
    falling,
    forecast_heads,
    forecast_losses,
)
from kvtool.policies.allocate.problem import AllocationProblem, LossCurves


def measured(budgets, losses):
    """Curves of two samples that agree, so that every gain is beyond the noise."""
    return LossCurves(budgets, [losses, losses])


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
            errors.append([rng.random() for _ in budgets])  # made non-increasing
    min_budgets = [rng.randint(1, budgets[0]) for _ in range(layers)]
    total = rng.randint(layers * budgets[0], layers * n)
    return AllocationProblem(
        total=total,
        min_budgets=min_budgets,
        max_budgets=[n] * layers,
        curves=measured(budgets, errors),
    )


@pytest.mark.parametrize("convex", [True, False])
def test_no_split_has_less_error(convex):
    rng = random.Random(convex)
    for _ in range(60):
        problem = random_room(rng, convex=convex)
        points = [
            curve_points(
                problem.curves.budgets,
                falling(problem.curves.mean(layer)),
                problem.max_budgets[0],
            )
            for layer in range(problem.layers)
        ]
        split = best_split(problem)
        assert sum(split) == problem.total
        least = [problem.curves.budgets[0]] * problem.layers
        assert all(a <= x <= b for a, x, b in zip(least, split, problem.max_budgets, strict=True))
        value = partial(error_of, points, interpolate if convex else slow_hull)
        got = sum(value(i, tokens) for i, tokens in enumerate(split))
        best = least_sum(value, problem.total, least, problem.max_budgets)
        assert got == pytest.approx(best, abs=1e-9)


def test_a_layer_that_gains_nothing_stays_small():
    curves = measured([10, 20, 40], [[0.9, 0.5, 0.1], [0.01, 0.009, 0.008]])
    problem = AllocationProblem(
        total=50, min_budgets=[8, 8], max_budgets=[1000, 1000], curves=curves
    )
    assert Optimal().split(problem).tokens == [40, 10]


def test_the_lower_limit_is_kept_where_it_binds():
    curves = measured([10, 20, 40], [[0.9, 0.5, 0.1], [0.01, 0.009, 0.008]])
    problem = AllocationProblem(
        total=50, min_budgets=[16, 16], max_budgets=[1000, 1000], curves=curves
    )
    assert Optimal().split(problem).tokens == [34, 16]


def test_a_short_prompt_is_kept_whole_and_a_total_beyond_it_is_cut():
    curves = measured([10, 20], [[0.9, 0.5], [0.8, 0.1]])
    for total in (16, 40):
        split = Optimal().split(
            AllocationProblem(total=total, min_budgets=[1, 1], max_budgets=[8, 8], curves=curves)
        )
        assert split.tokens == [8, 8]
        assert split.clamped == (total == 40)


def test_an_unmeasured_small_budget_is_refused():
    curves = measured([10, 20], [[0.9, 0.5], [0.8, 0.1]])
    with pytest.raises(UsageError, match=r"9.5 tokens per layer are fewer than 10"):
        Optimal().split(
            AllocationProblem(total=19, min_budgets=[1, 1], max_budgets=[80, 80], curves=curves)
        )


def by_sample(*samples):
    """Two layers under budgets of 10 and 20 tokens; prompts of 40."""
    curves = LossCurves([10, 20], samples)
    return AllocationProblem(total=40, min_budgets=[1, 1], max_budgets=[40, 40], curves=curves)


def test_a_gain_within_one_standard_error_keeps_budgets_equal():
    sure = by_sample([[0.0, 0.0], [4.0, 2.0]], [[0.0, 0.0], [4.2, 2.2]])
    assert Optimal().split(sure).tokens == [10, 30]
    doubtful = by_sample([[0.0, 0.0], [4.0, 2.0]], [[3.0, 0.1], [0.0, 0.0]])
    assert Optimal().split(doubtful).tokens == [20, 20]
    barely = by_sample([[0.0, 0.0], [4.0, 2.0]], [[0.9, 0.0], [0.0, 0.0]])  # gains of 1 and -0.9
    assert best_split(barely) == [10, 30]
    assert Optimal().split(barely).tokens == [20, 20]


def test_the_forecast_worked_by_hand():
    problem = by_sample([[0.0, 0.0], [4.0, 2.0]], [[0.4, 0.2], [4.2, 2.4]])
    found = forecast_losses(problem, [10, 30])
    # equal: 2.0 and 2.6; planned: 0 + 1.0 and 0.4 + 1.2; gains of 1.0 each
    assert (found.equal, found.planned) == (pytest.approx(2.3), pytest.approx(1.3))
    assert found.standard_error == pytest.approx(0.0, abs=1e-9)
    found = forecast_losses(problem, [15, 25])
    # planned: 0 + 1.5 and 0.3 + 1.8; gains of 0.5 each
    assert found.planned == pytest.approx(1.8)
    assert found.gains
    assert forecast_losses(problem, [5, 35]) is None  # nothing was measured below 10


def test_the_standard_error_is_that_of_the_gains_over_samples():
    problem = by_sample([[0.0, 0.0], [4.0, 2.0]], [[0.0, 0.0], [1.0, 0.5]])
    found = forecast_losses(problem, [10, 30])
    gains = [2.0 - 1.0, 0.5 - 0.25]
    mean = sum(gains) / 2
    spread = sum((gain - mean) ** 2 for gain in gains) / (2 - 1)
    assert found.standard_error == pytest.approx((spread / 2) ** 0.5)
    assert found.equal - found.planned == pytest.approx(mean)


def head_problem(*layers, total, most, least=1, budgets=(10, 20)):
    """Layers of samples x heads x budgets."""
    curves = [LossCurves(list(budgets), samples) for samples in layers]
    limits = {"min_budgets": [least] * len(layers), "max_budgets": [most] * len(layers)}
    return AllocationProblem(total=total, head_curves=curves, **limits)


def curve_of_head(rng, budgets, n, convex):
    scale = rng.choice([0.01, 1.0, 9.0])
    return [scale * (n - b) ** 2 if convex else rng.random() for b in budgets]


@pytest.mark.parametrize("convex", [True, False])
def test_no_split_over_heads_with_whole_means_has_less_error(convex):
    """Every split of every layer's tokens over its heads, and of the total over the layers."""
    rng = random.Random(convex)
    for _ in range(25):
        layers, n = rng.randint(1, 3), rng.randint(8, 14)
        sizes = [rng.randint(1, 3) for _ in range(layers)]
        budgets = sorted(rng.sample(range(2, n), rng.randint(1, 3)))
        losses = [[curve_of_head(rng, budgets, n, convex) for _ in range(size)] for size in sizes]
        least = rng.randint(1, budgets[0])
        total = rng.randint(layers * budgets[0], layers * n)
        rows = [[own, own] for own in losses]
        problem = head_problem(*rows, total=total, most=n, least=least, budgets=budgets)
        split = best_heads(problem)
        assert [sum(own) % len(own) for own in split] == [0] * layers
        assert sum(sum(own) // len(own) for own in split) == total
        assert all(budgets[0] <= tokens <= n for own in split for tokens in own)
        points = [[curve_points(budgets, falling(curve), n) for curve in own] for own in losses]
        read = interpolate if convex else slow_hull
        got = sum(
            read(curve, tokens)
            for own, layer in zip(points, split, strict=True)
            for curve, tokens in zip(own, layer, strict=True)
        )

        def of_layer(layer, mean, points=points, read=read, n=n, low=budgets[0]):
            own = points[layer]
            value = partial(error_of, own, read)
            return least_sum(value, mean * len(own), [low] * len(own), [n] * len(own))

        best = least_sum(of_layer, total, [budgets[0]] * layers, [n] * layers)
        assert got == pytest.approx(best, abs=1e-9)


def test_heads_worked_by_hand():
    """One head of the second layer reads; 40 tokens a layer are 160 in all four heads."""
    first = [[0.0, 0.0], [0.1, 0.05]]
    second = [[0.0, 0.0], [4.0, 2.0]]
    problem = head_problem([first, first], [second, second], total=80, most=80)
    split = Optimal(heads=True).split(problem)
    # the slopes: 4/70 for the reader, up to 80; .1/70 for the other, up to 60 of what is left
    assert split.by_head == [[10, 60], [10, 80]]
    assert split.tokens == [35, 45]
    assert sum(split.tokens) == 80
    found = forecast_heads(problem, split)
    equal = 0.05 * 40 / 60 + 2.0 * 40 / 60
    assert found.equal == pytest.approx(equal)
    assert found.planned == pytest.approx(0.05 * 20 / 60)
    assert found.standard_error == pytest.approx(0.0, abs=1e-9)


def test_a_gain_of_heads_within_one_standard_error_keeps_budgets_equal():
    layers = [[[0.0, 0.0], [4.0, 2.0]], [[3.0, 0.1], [0.0, 0.0]]]
    problem = head_problem(layers, total=20, most=40)
    split = Optimal(heads=True).split(problem)
    assert (split.tokens, split.by_head) == ([20], None)
    found = forecast_heads(problem, split)
    assert (found.planned, found.standard_error) == (found.equal, 0.0)


def test_an_unmeasured_small_budget_of_heads_is_refused():
    problem = head_problem([[[0.9, 0.5]] * 2] * 2, total=9, most=40)
    with pytest.raises(UsageError, match="9 tokens per layer are fewer than 10") as told:
        Optimal(heads=True).split(problem)
    assert "--metrics 'answer_loss(heads=true)' --budgets 4,.." in told.value.hint


def test_a_prompt_that_fits_is_kept_whole_in_every_head():
    layer = [[0.9, 0.5], [0.8, 0.1]]
    problem = head_problem([layer, layer], total=8, most=8)
    assert Optimal(heads=True).split(problem).tokens == [8]
