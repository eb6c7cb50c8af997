"""Loss-optimal budgets: each token goes to the layer whose cut costs the answer most.

Our own. A profile holds what is lost of an answer where one layer alone is cut to a few budgets
(`kvtool.profiling.answer_loss`). The losses of the layers are added up. A layer that keeps the
whole prompt loses nothing, and no layer gets fewer tokens than the smallest budget that was
measured. The mean curve of a layer is made non-increasing and its loss taken along the lower convex
hull, on which filling the steepest segments first is exact. No other split of the total has a
smaller sum. Budgets stay equal where this sum is not below theirs by more than its standard error.

With `heads=true` the same is done with losses of KV heads. The mean over the heads of a layer is a
whole number of tokens, and no other split with such means has a smaller sum.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import ClassVar

from kvtool.errors import UsageError
from kvtool.maths.allocation import Allocation
from kvtool.policies.allocate.problem import AllocationProblem, LossCurves
from kvtool.policies.allocate.uniform import Uniform
from kvtool.policies.parts import Allocator
from kvtool.policies.spelling import spell_settings

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
        segments += [(slope, layer, length) for slope, length in _segments(hull)]
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


def forecast_losses(
    problem: AllocationProblem, tokens: Sequence[int], even: Sequence[int] = ()
) -> LossForecast | None:
    """Forecast what a split loses, beside equal budgets.

    Args:
        tokens: of each layer.
        even: equal budgets; nothing: as they are split equally.

    Returns:
        None where a layer gets fewer tokens than the smallest budget that was measured.
    """
    curves, most = problem.curves, problem.max_budgets
    even = even or Uniform().split(problem).tokens
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
    """The split that loses least of the answer, by a profile's loss curves.

    Args:
        heads: split over the KV heads of all layers, which then keep unequal counts.
    """

    heads: bool = False

    name: ClassVar = "optimal"
    paper: ClassVar = "-"
    metric: ClassVar = "answer_loss"

    @property
    def measurement(self) -> str:
        """Return what `kvtool profile --metrics` is given for it."""
        return shlex.quote(self.metric + spell_settings(self))

    def split(self, problem: AllocationProblem) -> Allocation:
        """Give every layer its tokens.

        Raises:
            UsageError: the mean budget is below the smallest that was measured.
        """
        curves = problem.head_curves[0] if self.heads else problem.curves
        smallest = curves.budgets[0]
        mean = problem.total / problem.layers
        if mean < min(smallest, *problem.max_budgets):
            raise UsageError(
                f"allocator `{self.name}`: {mean:g} tokens per layer are fewer than {smallest}, "
                "the smallest budget whose loss the profile holds",
                hint=f"kvtool profile --metrics {self.measurement} "
                f"--budgets {int(mean) // 2 or 1},..",
            )
        if self.heads:
            best = best_heads(problem)
            split = Allocation([sum(own) // len(own) for own in best], problem.total, best)
            forecast = forecast_heads(problem, split)
        else:
            split = Allocation(best_split(problem), problem.total)
            forecast = forecast_losses(problem, split.tokens)
        gains = forecast is not None and forecast.gains
        return split if gains else Uniform().split(problem)


def best_split(problem: AllocationProblem) -> list[int]:
    """Return the tokens of each layer whose summed loss is smallest along the hulls."""
    curves = problem.curves
    limits = zip(problem.min_budgets, problem.max_budgets, strict=True)
    hulls = [_hull(curves, layer, *both) for layer, both in enumerate(limits)]
    return least_loss(hulls, _possible(hulls, problem))


def best_heads(problem: AllocationProblem) -> list[list[int]]:
    """Return the tokens of each KV head of each layer whose summed loss is smallest.

    The heads of a layer have a whole number of tokens in the mean.
    """
    limits = zip(problem.head_curves, problem.min_budgets, problem.max_budgets, strict=True)
    by_layer = [
        [_hull(curves, head, least, most) for head in range(len(curves.by_sample[0]))]
        for curves, least, most in limits
    ]
    means = [_mean_hull(hulls) for hulls in by_layer]
    split = least_loss(means, _possible(means, problem))
    pairs = zip(by_layer, split, strict=True)
    return [least_loss(hulls, mean * len(hulls)) for hulls, mean in pairs]


def by_heads(problem: AllocationProblem) -> AllocationProblem:
    """Return a problem of the same total whose layers are the KV heads of all layers."""
    sizes = [len(curves.by_sample[0]) for curves in problem.head_curves]

    def of_heads(limits: Sequence[int]) -> list[int]:
        return [each for each, size in zip(limits, sizes, strict=True) for _ in range(size)]

    samples = zip(*(curves.by_sample for curves in problem.head_curves), strict=True)
    flat = [[curve for layer in sample for curve in layer] for sample in samples]
    return replace(
        problem,
        min_budgets=of_heads(problem.min_budgets),
        max_budgets=of_heads(problem.max_budgets),
        curves=LossCurves(problem.head_curves[0].budgets, flat),
        head_curves=(),
    )


def forecast_heads(problem: AllocationProblem, split: Allocation) -> LossForecast | None:
    """Forecast what a split loses by the curves of KV heads, as `forecast_losses` does."""
    sizes = [len(curves.by_sample[0]) for curves in problem.head_curves]

    def alike(tokens: Sequence[int]) -> list[int]:
        return [own for own, size in zip(tokens, sizes, strict=True) for _ in range(size)]

    even = alike(Uniform().split(problem).tokens)
    if split.by_head is None:
        return forecast_losses(by_heads(problem), alike(split.tokens), even)
    tokens = [own for layer in split.by_head for own in layer]
    return forecast_losses(by_heads(problem), tokens, even)


def _hull(curves: LossCurves, place: int, least: int, most: int) -> list[Point]:
    points = curve_points(curves.budgets, falling(curves.mean(place)), most)
    return _within(convex_hull(points), least)


def _possible(hulls: Sequence[Sequence[Point]], problem: AllocationProblem) -> int:
    """Return the total of a problem, or the nearest that hulls and limits allow."""
    possible = max(problem.total, sum(hull[0][0] for hull in hulls))
    return min(possible, sum(problem.max_budgets))


def _mean_hull(hulls: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the least loss of a layer for every mean over its heads: convex, corners only.

    Between two corners the loss at whole means is on the line through them.
    """
    count = len(hulls)
    tokens, loss = sum(hull[0][0] for hull in hulls), math.fsum(hull[0][1] for hull in hulls)
    corners = [(tokens, loss)]
    for slope, length in sorted(segment for hull in hulls for segment in _segments(hull)):
        tokens, loss = tokens + length, loss + slope * length
        corners.append((tokens, loss))
    means = {mean for at, _ in corners for mean in (at // count, -(-at // count))}
    within = (mean for mean in sorted(means) if mean * count >= corners[0][0])
    return [(mean, _at(corners, mean * count)) for mean in within]


def _segments(hull: Sequence[Point]) -> list[tuple[float, int]]:
    """Return the slope and the length of each line between two corners."""
    return [
        ((below - loss) / (end - start), end - start)
        for (start, loss), (end, below) in pairwise(hull)
    ]


def _within(hull: list[Point], least: int) -> list[Point]:
    """Cut off what lies below the least tokens of a layer, by the line between the corners."""
    while len(hull) > 1 and hull[1][0] <= least:
        hull = hull[1:]
    (start, loss), *rest = hull
    if start >= least or not rest:
        return hull
    end, below = rest[0]
    return [(least, loss + (below - loss) * (least - start) / (end - start)), *rest]
