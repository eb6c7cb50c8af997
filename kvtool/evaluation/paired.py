"""Two variants held against each other on the same samples: paired bootstrap intervals.

Samples are drawn with replacement, the same ones for both, so that what makes a sample hard for
both cancels. Intervals are percentile intervals (Efron, Tibshirani, An Introduction to the
Bootstrap, 1993, chapter 13). Nothing is random: the draws follow from the number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvtool.evaluation.metrics.summary import Part

RESAMPLES = 4000
LEVEL = 0.95
LEAST_PAIRS = 6
"""Fewer pairs have no interval: of 5 differences, all of one sign, a sign test says p = 0.06."""

_AT_A_TIME = 2**20  # draws
_KEPT = 1024  # samples whose draws are kept for the next pair
_POWER = 2.8  # standard errors of a difference that four of five runs show: 1.96 + 0.84


@dataclass(frozen=True)
class Estimate:
    """A number over pairs of samples, and the ends of its interval; None: there is none.

    `spread` is its standard error, the standard deviation over resamples.
    """

    value: float
    low: float | None
    high: float | None
    spread: float | None = None

    def deciding(self, n: int) -> int | None:
        """Return about how many samples show such a difference in four of five runs.

        None where the interval over these `n` leaves out 0, where the value is 0 and where there is
        no interval.
        """
        if self.low is None or self.high is None or self.spread is None or self.value == 0:
            return None
        if not self.low <= 0 <= self.high:
            return None
        return max(n + 1, math.ceil(n * (_POWER * self.spread / self.value) ** 2))


def difference(
    ours: Sequence[Part], theirs: Sequence[Part], link: Callable[[float], float] = float
) -> Estimate:
    """Subtract one variant's score, such as the full cache's, from another's.

    A score is `link` of the sum of the samples' sums over the sum of their weights.

    Args:
        ours, theirs: of the same samples in the same order, one or more.

    Returns:
        With the interval, unless there are fewer than `LEAST_PAIRS` pairs or a resampled score is
        not finite.
    """

    def of(a: Sequence[float], b: Sequence[float]) -> list[float]:
        return [link(x) - link(y) for x, y in zip(a, b, strict=True)]

    return _estimate(of, ours, theirs)


def excess(
    here: tuple[Sequence[Part], Sequence[Part]],
    there: tuple[Sequence[Part], Sequence[Part]],
    link: Callable[[float], float] = float,
) -> Estimate:
    """Subtract one difference between two variants, such as at another budget, from another.

    Args:
        here, there: what `difference` takes, all four of the same samples in the same order.
    """

    def of(*means: Sequence[float]) -> list[float]:
        columns = zip(*(map(link, mean) for mean in means), strict=True)
        return [(a - b) - (c - d) for a, b, c, d in columns]

    return _estimate(of, *here, *there)


def ratio(ours: Sequence[Part], theirs: Sequence[Part]) -> Estimate:
    """Divide one variant's mean by another's; arguments and result as of `difference`."""

    def of(a: Sequence[float], b: Sequence[float]) -> list[float]:
        return [x / y if y else math.inf for x, y in zip(a, b, strict=True)]

    return _estimate(of, ours, theirs)


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


def _estimate(of: Callable[..., list[float]], *samples: Sequence[Part]) -> Estimate:
    """Apply `of` to the means of each list, and to those of each resample."""
    sizes = [len(each) for each in samples]
    if len(set(sizes)) > 1 or not sizes[0]:
        raise ValueError(f"{' and '.join(map(str, sizes))} samples cannot be paired")
    (value,) = of(*([mean_of(each)] for each in samples))
    if sizes[0] < LEAST_PAIRS:
        return Estimate(value, None, None)
    found = of(*_resampled_means(*samples))
    if not all(map(math.isfinite, found)):
        return Estimate(value, None, None)
    tail, over = (1 - LEVEL) / 2, torch.tensor(found, dtype=torch.float64)
    low, high = over.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Estimate(value, low, high, over.std().item())


def _resampled_means(*samples: Sequence[Part]) -> list[list[float]]:
    """Return `RESAMPLES` weighted means of each list, over the same draws in all of them."""
    columns = torch.tensor(samples, dtype=torch.float64)  # (lists, n, 2)
    lists, n, _ = columns.shape
    flat = columns.transpose(0, 1).reshape(n, 2 * lists)
    drawn = _drawn_once(n) if n <= _KEPT else _times_drawn(n)
    sums = torch.cat([counts @ flat for counts in drawn]).view(-1, lists, 2)
    return (sums[..., 0] / sums[..., 1]).T.tolist()


@lru_cache(maxsize=1)
def _drawn_once(n: int) -> list[Tensor]:
    """Return what `_times_drawn` yields; a run compares many pairs of one number of samples."""
    return list(_times_drawn(n))


def _times_drawn(n: int) -> Iterator[Tensor]:
    """Yield (resamples, n) float64: how often each sample is drawn; `RESAMPLES` rows in all."""
    generator = torch.Generator().manual_seed(n)
    rows = max(1, _AT_A_TIME // n)
    for start in range(0, RESAMPLES, rows):
        drawn = torch.randint(n, (min(rows, RESAMPLES - start), n), generator=generator)
        counts = torch.zeros(drawn.shape, dtype=torch.float64)
        yield counts.scatter_add_(1, drawn, torch.ones_like(counts))
