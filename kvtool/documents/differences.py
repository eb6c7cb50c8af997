"""Scores of samples, and arms held against each other on the same samples."""

from __future__ import annotations

from typing import Literal

from pydantic import FiniteFloat, PositiveInt

from kvtool.documents.document import Section


class SampleScores(Section):
    """What each sample gives to a score: the sum of `sums` over the sum of `weights`.

    In the order of the document's `samples` of the task, None where one has no result. `weights`
    is None where each is 1. `link` says what is taken of the quotient: itself, or (of a perplexity)
    e to its power.
    """

    sums: list[FiniteFloat | None]
    weights: list[FiniteFloat | None] | None = None
    link: Literal["mean", "exp"] = "mean"


class Difference(Section):
    """One arm's score less another's, over the `n` samples that both have.

    `low` and `high` are the ends of the 95 % interval, percentiles of a paired bootstrap over the
    samples, None where they are too few for one. `deciding` is about how many samples would show a
    difference of this size in four of five runs; None where this many have shown it, where there is
    none to show, and where there is no interval. `because` says why these two are compared.
    """

    task: str
    arm: str
    against: str
    because: Literal["base", "best", "asked"]
    n: PositiveInt
    difference: FiniteFloat
    low: FiniteFloat | None
    high: FiniteFloat | None
    lower_is_better: bool
    deciding: PositiveInt | None

    @property
    def standing(self) -> Literal["better", "worse", "within the noise", "no interval"]:
        """Return what the interval allows to say of the arm."""
        if self.low is None or self.high is None:
            return "no interval"
        if self.low <= 0 <= self.high:
            return "within the noise"
        return "better" if (self.low > 0) != self.lower_is_better else "worse"
