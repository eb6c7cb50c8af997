"""Error-optimal budgets: each token goes to the layer whose measured output error falls most.

Our own. A profile holds the error of every layer under a few budgets; a layer that keeps the whole
prompt has none. Between these points the error is taken along the lower convex hull, on which
filling the steepest segments first is exact. No other split of the total has a smaller sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from kvtool.errors import UsageError
from kvtool.maths.allocation import Allocation
from kvtool.policies.allocate.problem import AllocationProblem, ErrorCurves
from kvtool.policies.parts import Allocator

Point = tuple[int, float]
"""Tokens, and the error with them."""


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


def curve_points(curves: ErrorCurves, layer: int, most: int) -> list[Point]:
    """Return the measured points of a layer below `most`, and no error from there on."""
    measured = zip(curves.budgets, curves.errors[layer], strict=True)
    return [(budget, error) for budget, error in measured if budget < most] + [(most, 0.0)]


def least_error(hulls: Sequence[Sequence[Point]], total: int) -> list[int]:
    """Split a total over convex curves so that the sum of errors is smallest.

    Args:
        hulls: convex and falling, one per layer.
        total: between the sum of the first points and the sum of the last ones.
    """
    tokens = [hull[0][0] for hull in hulls]
    left = total - sum(tokens)
    segments = []
    for layer, hull in enumerate(hulls):
        for (start, error), (end, below) in pairwise(hull):
            segments.append(((below - error) / (end - start), layer, end - start))
    for _, layer, length in sorted(segments):
        given = min(length, left)
        tokens[layer] += given
        left -= given
    return tokens


@dataclass(frozen=True)
class Optimal(Allocator):
    """The split of least total output error, by a profile's error curves."""

    name: ClassVar = "optimal"
    paper: ClassVar = "-"
    metric: ClassVar = "output_error"

    def split(self, problem: AllocationProblem) -> Allocation:
        """Give every layer its tokens.

        Raises:
            UsageError: the mean budget is below the smallest that was measured.
        """
        curves = problem.curves
        smallest = curves.budgets[0]
        mean = problem.total / problem.layers
        if mean < min(smallest, *problem.max_budgets):
            raise UsageError(
                f"allocator `{self.name}`: {mean:g} tokens per layer are fewer than {smallest}, "
                "the smallest budget whose error the profile holds"
            )
        hulls = [
            _within(convex_hull(curve_points(curves, layer, most)), least)
            for layer, (least, most) in enumerate(
                zip(problem.min_budgets, problem.max_budgets, strict=True)
            )
        ]
        possible = max(problem.total, sum(hull[0][0] for hull in hulls))
        return Allocation(
            least_error(hulls, min(possible, sum(problem.max_budgets))), problem.total
        )


def _within(hull: list[Point], least: int) -> list[Point]:
    """Cut off what lies below the least tokens of a layer, by the line between the corners."""
    while len(hull) > 1 and hull[1][0] <= least:
        hull = hull[1:]
    (start, error), *rest = hull
    if start >= least or not rest:
        return hull
    end, below = rest[0]
    return [(least, error + (below - error) * (least - start) / (end - start)), *rest]
