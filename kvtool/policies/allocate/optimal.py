"""Loss-optimal budgets: each token goes to the layer whose cut costs the answer most.

Our own. A profile holds what is lost of an answer where one layer alone is cut to a few budgets
(`kvtool.profiling.answer_loss`). The losses of the layers are added up. A layer that keeps the
whole prompt loses nothing, and no layer gets fewer tokens than the smallest budget that was
measured. The mean curve of a layer is made non-increasing and its loss taken along the lower convex
hull, on which filling the steepest segments first is exact. No other split of the total has a
smaller sum. Budgets stay equal where this sum is not below theirs by more than its standard error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

from kvtool.errors import UsageError
from kvtool.maths.allocation import Allocation
from kvtool.policies.allocate.problem import AllocationProblem, LossCurves
from kvtool.policies.allocate.uniform import Uniform
from kvtool.policies.parts import Allocator

Point = tuple[int, float]
"""Tokens, and the loss with them."""


def convex_hull(points: Sequence[Point]) -> list[Point]:
    """Return the corners of the lower convex hull, by tokens, which ascend in `points`."""
    hull: list[Point] = []
    for point in points:
        while len(hull) > 1 and _above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _above(left: Point, middle: Point, right: Point) -> bool:
    """Return whether a point lies on or above the line between its neighbours."""
    rise = (right[1] - left[1]) * (middle[0] - left[0])
    return (middle[1] - left[1]) * (right[0] - left[0]) >= rise


def curve_points(budgets: Sequence[int], losses: Sequence[float], most: int) -> list[Point]:
    """Return the measured points of a layer below `most`, and no loss from there on."""
    measured = zip(budgets, losses, strict=True)
    return [(budget, loss) for budget, loss in measured if budget < most] + [(most, 0.0)]


def falling(losses: Sequence[float]) -> list[float]:
    """Return losses of ascending budgets, none above that of a smaller one.

    >>> falling([3.0, 1.0, 2.0])
    [3.0, 1.0, 1.0]
    """
    return list(accumulate(losses, min))


def least_loss(hulls: Sequence[Sequence[Point]], total: int) -> list[int]:
    """Split a total over convex curves so that the sum of losses is smallest.

    Args:
        hulls: convex and falling, one per layer.
        total: between the sum of the first points and the sum of the last ones.
    """
    tokens = [hull[0][0] for hull in hulls]
    left = total - sum(tokens)
    segments = []
    for layer, hull in enumerate(hulls):
        for (start, loss), (end, below) in pairwise(hull):
            segments.append(((below - loss) / (end - start), layer, end - start))
    for _, layer, length in sorted(segments):
        given = min(length, left)
        tokens[layer] += given
        left -= given
    return tokens


@dataclass(frozen=True)
class LossForecast:
    """What two splits of a total are expected to lose of an answer, in nats per token.

    Attributes:
        equal: of equal budgets.
        planned: of another split.
        standard_error: of their difference, over the samples.
    """

    equal: float
    planned: float
    standard_error: float

    @property
    def gains(self) -> bool:
        """Return whether the other split loses less, by more than one standard error."""
        return self.equal - self.planned > self.standard_error


def forecast_losses(problem: AllocationProblem, tokens: Sequence[int]) -> LossForecast | None:
    """Forecast what a split loses, beside equal budgets.

    Args:
        tokens: of each layer.

    Returns:
        None where a layer gets fewer tokens than the smallest budget that was measured.
    """
    curves, most = problem.curves, problem.max_budgets
    even = Uniform().split(problem).tokens
    if any(min(split) < min(curves.budgets[0], min(most)) for split in (tokens, even)):
        return None
    equal, planned = (_losses(curves, split, most) for split in (even, tokens))
    gains = [before - after for before, after in zip(equal, planned, strict=True)]
    mean, count = math.fsum(gains) / len(gains), len(gains)
    spread = math.fsum((gain - mean) ** 2 for gain in gains) / (count - 1)
    return LossForecast(
        math.fsum(equal) / count, math.fsum(planned) / count, math.sqrt(spread / count)
    )


def _losses(curves: LossCurves, tokens: Sequence[int], most: Sequence[int]) -> list[float]:
    """Return the sum over layers for each sample, on the lines between measured budgets."""
    return [
        math.fsum(
            _at(curve_points(curves.budgets, losses, full), own)
            for losses, own, full in zip(sample, tokens, most, strict=True)
        )
        for sample in curves.by_sample
    ]


def _at(points: Sequence[Point], tokens: int) -> float:
    for (start, loss), (end, below) in pairwise(points):
        if tokens <= end:
            return loss + (below - loss) * (tokens - start) / (end - start)
    return points[-1][1]


@dataclass(frozen=True)
class Optimal(Allocator):
    """The split that loses least of the answer, by a profile's loss curves."""

    name: ClassVar = "optimal"
    paper: ClassVar = "-"
    metric: ClassVar = "answer_loss"

    def split(self, problem: AllocationProblem) -> Allocation:
        """Give every layer its tokens.

        Raises:
            UsageError: the mean budget is below the smallest that was measured.
        """
        smallest = problem.curves.budgets[0]
        mean = problem.total / problem.layers
        if mean < min(smallest, *problem.max_budgets):
            raise UsageError(
                f"allocator `{self.name}`: {mean:g} tokens per layer are fewer than {smallest}, "
                "the smallest budget whose loss the profile holds",
                hint=f"kvtool profile --metrics {self.metric} --budgets {int(mean) // 2 or 1},..",
            )
        best = best_split(problem)
        forecast = forecast_losses(problem, best)
        if forecast is None or not forecast.gains:
            return Uniform().split(problem)
        return Allocation(best, problem.total)


def best_split(problem: AllocationProblem) -> list[int]:
    """Return the tokens of each layer whose summed loss is smallest along the hulls."""
    curves = problem.curves
    limits = zip(problem.min_budgets, problem.max_budgets, strict=True)
    hulls = []
    for layer, (least, most) in enumerate(limits):
        points = curve_points(curves.budgets, falling(curves.mean(layer)), most)
        hulls.append(_within(convex_hull(points), least))
    possible = max(problem.total, sum(hull[0][0] for hull in hulls))
    return least_loss(hulls, min(possible, sum(problem.max_budgets)))


def _within(hull: list[Point], least: int) -> list[Point]:
    """Cut off what lies below the least tokens of a layer, by the line between the corners."""
    while len(hull) > 1 and hull[1][0] <= least:
        hull = hull[1:]
    (start, loss), *rest = hull
    if start >= least or not rest:
        return hull
    end, below = rest[0]
    return [(least, loss + (below - loss) * (least - start) / (end - start)), *rest]
