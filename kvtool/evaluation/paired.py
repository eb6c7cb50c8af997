"""A variant held against the full cache on the same samples: paired bootstrap intervals.

Samples are drawn with replacement, the same ones for both, so that what makes a sample hard for
both cancels. Intervals are percentile intervals (Efron, Tibshirani, An Introduction to the
Bootstrap, 1993, chapter 13). Nothing is random: the draws follow from the number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtool.evaluation.metrics.summary import Part

RESAMPLES = 4000
LEVEL = 0.95
LEAST_PAIRS = 6
"""Fewer pairs have no interval: of 5 differences, all of one sign, a sign test says p = 0.06."""

_AT_A_TIME = 2**20  # draws


@dataclass(frozen=True)
class Estimate:
    """A number over pairs of samples, and the ends of its interval; None: there is none."""

    value: float
    low: float | None
    high: float | None


def difference(
    ours: Sequence[Part], full: Sequence[Part], link: Callable[[float], float] = float
) -> Estimate:
    """Subtract the full cache's score from a variant's.

    A score is `link` of the sum of the samples' sums over the sum of their weights.

    Args:
        ours, full: of the same samples in the same order, one or more.

    Returns:
        With the interval, unless there are fewer than `LEAST_PAIRS` pairs or a resampled score is
        not finite.
    """

    def of(a: Sequence[float], b: Sequence[float]) -> list[float]:
        return [link(x) - link(y) for x, y in zip(a, b, strict=True)]

    return _estimate(ours, full, of)


def ratio(ours: Sequence[Part], full: Sequence[Part]) -> Estimate:
    """Divide a variant's mean by the full cache's; arguments and result as of `difference`."""

    def of(a: Sequence[float], b: Sequence[float]) -> list[float]:
        return [x / y if y else math.inf for x, y in zip(a, b, strict=True)]

    return _estimate(ours, full, of)


def mean_of(parts: Sequence[Part]) -> float:
    """Divide the sum of sums by the sum of weights.

    >>> mean_of([(3.0, 1.0), (1.0, 3.0)])
    1.0
    """
    return math.fsum(part[0] for part in parts) / math.fsum(part[1] for part in parts)


def unseen(n: int) -> float:
    """Return the share of samples that may differ although none of `n` does, at 95 %.

    The exact form of the rule of three: (1 - share)^n = 0.05.

    >>> round(unseen(10), 3), round(unseen(60), 3)
    (0.259, 0.049)
    """
    return 1 - (1 - LEVEL) ** (1 / n)


def _estimate(
    ours: Sequence[Part],
    full: Sequence[Part],
    of: Callable[[Sequence[float], Sequence[float]], list[float]],
) -> Estimate:
    if len(ours) != len(full) or not ours:
        raise ValueError(f"{len(ours)} samples cannot be paired with {len(full)}")
    (value,) = of([mean_of(ours)], [mean_of(full)])
    if len(ours) < LEAST_PAIRS:
        return Estimate(value, None, None)
    found = of(*_resampled_means(ours, full))
    if not all(map(math.isfinite, found)):
        return Estimate(value, None, None)
    tail = (1 - LEVEL) / 2
    ends = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    low, high = torch.tensor(found, dtype=torch.float64).quantile(ends).tolist()
    return Estimate(value, low, high)


def _resampled_means(*samples: Sequence[Part]) -> list[list[float]]:
    """Return `RESAMPLES` weighted means of each list, over the same draws in all of them."""
    columns = torch.tensor(samples, dtype=torch.float64)  # (lists, n, 2)
    lists, n, _ = columns.shape
    flat = columns.transpose(0, 1).reshape(n, 2 * lists)
    sums = torch.cat([counts @ flat for counts in _times_drawn(n)]).view(-1, lists, 2)
    return (sums[..., 0] / sums[..., 1]).T.tolist()


def _times_drawn(n: int) -> Iterator[Tensor]:
    """Yield (resamples, n) float64: how often each sample is drawn; `RESAMPLES` rows in all."""
    generator = torch.Generator().manual_seed(n)
    rows = max(1, _AT_A_TIME // n)
    for start in range(0, RESAMPLES, rows):
        drawn = torch.randint(n, (min(rows, RESAMPLES - start), n), generator=generator)
        counts = torch.zeros(drawn.shape, dtype=torch.float64)
        yield counts.scatter_add_(1, drawn, torch.ones_like(counts))
