"""Variants compared on the same samples, with the full cache and with each other."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveInt

from kvtool.documents.document import WAS_ARM, WERE_ARMS, Section

WITHIN = 5.0
"""Percent of the full cache's score that a variant may lack, by default."""


CHANCE = 0.05
"""The largest corrected p-value at which a difference counts."""


Loss = Annotated[FiniteFloat, Field(gt=0, lt=100)]
"""The mean loss that a guarantee allows, in percent."""


class Interval(Section):
    """A number and the ends of its 95 % interval."""

    value: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat


class Paired(Section):
    """A variant compared with the full cache over the `n` samples that both have.

    `full` is the headline of the full cache over those samples and `difference` what the variant's
    is above it, in the metric's own scale. `low` and `high` are the ends of its 95 % interval,
    percentiles of a bootstrap over the samples, None where they are too few for one. `speed` is how
    many times as many tokens per second are decoded, None where none are.
    """

    n: PositiveInt
    full: FiniteFloat
    difference: FiniteFloat
    low: FiniteFloat | None
    high: FiniteFloat | None
    speed: Interval | None

    def percent(self, *, lower_is_better: bool) -> tuple[float, float | None, float | None]:
        """Return the difference and the ends of its interval in percent of the full cache's score.

        Above 0 where the variant is the better one, whichever way the metric goes. The full cache's
        score must not be 0.
        """
        scale = (-100 if lower_is_better else 100) / abs(self.full)
        if self.low is None or self.high is None:
            return scale * self.difference, None, None
        low, high = sorted((scale * self.low, scale * self.high))
        return scale * self.difference, low, high


class Standing(Section):
    """Whether a variant's score is within a number of percent of the full cache's, on every task.

    `within`: the 95 % interval of its difference is; `undecided`: only the difference itself is, or
    there is no interval; `outside`: not even the difference is. `task` is the one that decides it,
    `difference`, `low` and `high` are its, in percent of the full cache's score, above 0 where the
    variant is the better one. `why` says in words what prevents a comparison.
    """

    variant: Annotated[str, WAS_ARM]
    standing: Literal["within", "undecided", "outside"]
    task: str
    n: NonNegativeInt
    difference: FiniteFloat | None
    low: FiniteFloat | None
    high: FiniteFloat | None
    why: str | None = None


class Choice(Section):
    """The cheapest variant whose score is within bounds and that is cheaper than the full cache.

    `cost` and `full` are means over samples: bytes held, bytes of keys and values that a decoded
    token reads, or seconds of a decoded token. `variant` is None where there is none; `undecided`
    are variants cheaper still (than the full cache, where there is none) that more samples could
    show to be within bounds. `speed` is the choice's by time, on the task where it is least sure to
    be faster.
    """

    by: Literal["bytes", "traffic", "time"]
    variant: Annotated[str | None, WAS_ARM]
    cost: NonNegativeFloat | None
    full: NonNegativeFloat | None
    undecided: list[str]
    speed: Interval | None = None


class Bounded(Section):
    """How much a variant loses against the full cache, on the task where that is least sure.

    `lost` is the sum of the losses of `n` contexts, each 0 or 1 if `counted`. `p` is the chance of
    so little where the guarantee does not hold. `bound` is the largest mean loss, in percent, that
    fits what was seen; all bounds hold at once, at 95 %. `why` says what prevents a test.
    """

    variant: str
    passed: bool = False
    task: str
    n: NonNegativeInt = 0
    lost: NonNegativeFloat = 0.0
    counted: bool = True
    p: FiniteFloat = 1.0
    bound: FiniteFloat = 100.0
    why: str | None = None


class Guarantee(Section):
    """Which variants lose at most `loss` percent in the mean, at 95 % confidence, on every task.

    `chain` has them as they are tested, policy by policy, from the largest budget down. `level` is
    that of each policy's tests.
    """

    loss: Loss
    level: Annotated[FiniteFloat, Field(gt=0, lt=1)]
    chain: list[Bounded]


class Verdict(Section):
    """The cheapest variants whose scores are within `within` percent of the full cache's.

    On each of `tasks`, which are those where percent of the full cache's score mean something.
    `variants` holds the evidence of each variant; `why` says why there is no verdict. `guarantee`
    is None where none was asked for before the run.
    """

    within: FiniteFloat
    why: str | None
    tasks: list[str]
    variants: Annotated[list[Standing], WERE_ARMS]
    choices: list[Choice]
    guarantee: Guarantee | None = None

    def of(self, variant: str) -> Standing | None:
        """Return the standing of one variant."""
        return next((each for each in self.variants if each.variant == variant), None)


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
    """One variant's score less another's, over the `n` samples that both have.

    `low` and `high` are the ends of the 95 % interval, percentiles of a paired bootstrap over the
    samples, None where they are too few for one. `deciding` is about how many samples would show a
    difference of this size in four of five runs. It is None where this many have shown it, where
    there is none to show, and where there is no interval. `because` says why these two are
    compared. `p` is the smallest level at which the interval leaves out 0, and `p_holm` the one
    corrected for the number of `comparisons` that were asked for.
    """

    task: str
    variant: Annotated[str, WAS_ARM]
    against: str
    because: Literal["base", "best", "asked"]
    n: PositiveInt
    difference: FiniteFloat
    low: FiniteFloat | None
    high: FiniteFloat | None
    lower_is_better: bool
    deciding: PositiveInt | None
    p: FiniteFloat | None = None
    p_holm: FiniteFloat | None = None
    comparisons: PositiveInt | None = None

    @property
    def asked(self) -> bool:
        """Return whether the user asked for the comparison, and it is corrected."""
        return self.p_holm is not None

    @property
    def standing(self) -> Literal["better", "worse", "within the noise", "no interval"]:
        """Return what the interval, or the corrected p-value, allows to say of the variant."""
        if self.low is None or self.high is None:
            return "no interval"
        luck = self.low <= 0 <= self.high if self.p_holm is None else self.p_holm > CHANCE
        if luck:
            return "within the noise"
        return "better" if (self.difference > 0) != self.lower_is_better else "worse"
