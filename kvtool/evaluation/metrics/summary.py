"""Scores of samples put together: means, standard errors, cells and curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Part = tuple[float, float]
"""What one sample gives to a mean: its sum and its weight."""


def _exp(mean_nll: float) -> float:
    try:
        return math.exp(mean_nll)
    except OverflowError:
        return math.inf


LINKS: dict[str, Callable[[float], float]] = {"mean": float, "exp": _exp}
"""What is taken of a quotient of sums: itself, or e to its power, which may be infinite."""


@dataclass(frozen=True)
class Statistic:
    """A number over samples; `stderr` is its standard error, None where it has none."""

    value: float
    n: int
    stderr: float | None = None


@dataclass(frozen=True)
class Curve:
    """A named line for a picture, such as the NLL against the position."""

    x: Sequence[float]
    y: Sequence[float]
    x_label: str
    y_label: str


@dataclass(frozen=True)
class Summary:
    """What a task says about one variant.

    Attributes:
        metrics: every score by name; the headline is the task's `metric`.
        cells: the headline per cell.
        curves: lines for pictures.
        parts: of each record, in order, the headline's sum and weight. The headline is `link`, one
            of `LINKS`, of all sums over all weights; empty where it is no such mean.
    """

    metrics: dict[str, Statistic]
    cells: list[tuple[Mapping[str, int | float | str], Statistic]] = field(default_factory=list)
    curves: dict[str, Curve] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    link: Literal["mean", "exp"] = "mean"


def mean(values: Sequence[float]) -> Statistic:
    """Return the mean with its standard error, from the sample variance.

    >>> mean([0.0, 1.0, 1.0, 0.0])
    Statistic(value=0.5, n=4, stderr=0.28867513459481287)
    """
    n = len(values)
    centre = math.fsum(values) / n
    if n < 2:
        return Statistic(centre, n)
    variance = math.fsum((value - centre) ** 2 for value in values) / (n - 1)
    return Statistic(centre, n, math.sqrt(variance / n))
