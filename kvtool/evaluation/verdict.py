"""Compare variants sample by sample, and name the cheapest that are as good as the full cache.

Verdict: a variant is within X % if on every task the lower end of the paired 95 % interval of its
score against the full cache's is above -X % of the full cache's score (the upper end below +X %,
where smaller is better). Where only the difference itself is, more samples have to decide. Costs
are means over the samples of all tasks. Only a document of results is needed.

Pairs: each variant is compared with its base, the same policy with fewer modifiers, where the run
has that at the same budget. Else it is compared with the variant of that budget with the best
score. Intervals are not widened for the number of variants: of twenty variants of equal truth, one
is expected to fall outside the noise.

Intervals: paired bootstrap on the same samples. Samples are drawn with replacement, the same ones
for both variants, so that what makes a sample hard for both cancels. Intervals are percentile
intervals (Efron, Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13). Nothing is
random: the draws follow from the number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, get_args

from kvtool.documents.results import TaskResult, VariantEntry
from kvtool.documents.verdict import Choice, Difference, Interval, SampleScores, Standing, Verdict
from kvtool.evaluation.costs import spent_on
from kvtool.evaluation.metrics.summary import LINKS, Part
from kvtool.evaluation.run.collect import is_baseline
from kvtool.policies.spelling import split_outside

if TYPE_CHECKING:
    from torch import Tensor

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

    `spread` is its standard error, the standard deviation over resamples. `p` is the smallest level
    at which such an interval leaves out 0.
    """

    value: float
    low: float | None
    high: float | None
    spread: float | None = None
    p: float | None = None

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
    return _estimate(lambda a, b: link(a) - link(b), ours, theirs)


def excess(
    here: tuple[Sequence[Part], Sequence[Part]],
    there: tuple[Sequence[Part], Sequence[Part]],
    link: Callable[[float], float] = float,
) -> Estimate:
    """Subtract one difference between two variants, such as at another budget, from another.

    Args:
        here, there: what `difference` takes, all four of the same samples in the same order.
    """
    return _estimate(lambda a, b, c, d: link(a) - link(b) - (link(c) - link(d)), *here, *there)


def ratio(ours: Sequence[Part], theirs: Sequence[Part]) -> Estimate:
    """Divide one variant's mean by another's; arguments and result as of `difference`."""
    return _estimate(lambda a, b: a / b if b else math.inf, ours, theirs)


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


def _estimate(of: Callable[..., float], *samples: Sequence[Part]) -> Estimate:
    """Apply `of` to the means of each list, and to those of each resample."""
    import torch

    value = of(*map(mean_of, samples))
    if len(samples[0]) < LEAST_PAIRS:
        return Estimate(value, None, None)
    found = list(map(of, *_resampled_means(*samples)))
    if not all(map(math.isfinite, found)):
        return Estimate(value, None, None)
    tail, over = (1 - LEVEL) / 2, torch.tensor(found, dtype=torch.float64)
    low, high = over.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    sides = (over <= 0).sum().item(), (over >= 0).sum().item()
    p = min(1.0, 2 * (min(sides) + 1) / (len(found) + 1))
    return Estimate(value, low, high, over.std().item(), p)


def _resampled_means(*samples: Sequence[Part]) -> list[list[float]]:
    """Return `RESAMPLES` weighted means of each list, over the same draws in all of them."""
    import torch

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
    import torch

    generator = torch.Generator().manual_seed(n)
    rows = max(1, _AT_A_TIME // n)
    for start in range(0, RESAMPLES, rows):
        drawn = torch.randint(n, (min(rows, RESAMPLES - start), n), generator=generator)
        counts = torch.zeros(drawn.shape, dtype=torch.float64)
        yield counts.scatter_add_(1, drawn, torch.ones_like(counts))


By = Literal["bytes", "traffic", "time"]
_ORDER = ("outside", "undecided", "within")  # the first of those on any task is the variant's


def make_verdict(
    results: Sequence[TaskResult], variants: Sequence[VariantEntry], within: float
) -> Verdict | None:
    """Compare every variant with the full cache; None where nothing has been measured.

    Args:
        within: percent of the full cache's score.
    """
    if not any(result.n for result in results):
        return None
    full = {each.task: each for each in results if is_baseline(each.variant)}
    tasks = [task for task, result in full.items() if result.droppable and result.value]
    others = [variant.name for variant in variants if not is_baseline(variant.name)]
    if why := _why_none(full, tasks, others):
        return Verdict(within=within, why=why, tasks=tasks, variants=[], choices=[])
    found = {(result.variant, result.task): result for result in results}
    standings = [
        _worst(
            [_standing(found.get((variant, task)), full[task], variant, within) for task in tasks]
        )
        for variant in others
    ]
    choices = [_choice(by, standings, results) for by in get_args(By)]
    return Verdict(within=within, why=None, tasks=tasks, variants=standings, choices=choices)


def _why_none(full: dict[str, TaskResult], tasks: list[str], others: list[str]) -> str | None:
    """Say why there can be no verdict."""
    if not full:
        return "it needs the full cache beside the others (--baseline)"
    if not others:
        return "no policy stands beside the full cache"
    if tasks:
        return None
    measured = [result for result in full.values() if result.n]
    if not measured:
        return "no sample of the full cache was measured"
    if any(result.droppable for result in measured):
        return "the full cache scores 0"
    return "no task has a score of which percent mean something"


def _standing(result: TaskResult | None, full: TaskResult, variant: str, within: float) -> Standing:
    """Compare one variant with the full cache on one task."""
    pair, why = None if result is None else result.paired, why_undecided(result, full)
    gain = low = high = None
    if result is not None and pair is not None and pair.full != 0:
        gain, low, high = pair.percent(lower_is_better=result.lower_is_better)
    standing: Literal["within", "undecided", "outside"] = "undecided"
    if gain is not None and gain <= -within:
        standing = "outside"
    elif why is None and low is not None and low > -within:
        standing = "within"
    return Standing(
        variant=variant,
        standing=standing,
        task=full.task,
        n=0 if pair is None else pair.n,
        difference=gain,
        low=low,
        high=high,
        why=why,
    )


def why_undecided(result: TaskResult | None, full: TaskResult) -> str | None:
    """Say what keeps a variant from being compared."""
    if result is None or not result.n + result.failed:
        return "no sample was measured"
    if result.failed:
        return f"{result.failed} of {result.n + result.failed} samples failed"
    missing = full.n + full.failed - result.n
    if missing > 0:
        return f"{missing} of {result.n + missing} samples are missing"
    if not result.fed_like(full):
        return f"the text was fed by {result.chunk:g} tokens, to the full cache by {full.chunk:g}"
    pair = result.paired
    if pair is None:
        return f"its score is {'not finite' if result.value is None else 'no mean over samples'}"
    if pair.full == 0:
        return f"the full cache scores 0 on the {pair.n} samples that both have"
    return f"fewer than {LEAST_PAIRS} samples" if pair.n < LEAST_PAIRS else None


def _worst(standings: Sequence[Standing]) -> Standing:
    """Return that of the task on which a variant does worst."""

    def rank(standing: Standing) -> tuple[int, float]:
        known = [each for each in (standing.low, standing.difference) if each is not None]
        return _ORDER.index(standing.standing), min(known, default=-100.0)

    return min(standings, key=rank)


def _choice(by: By, standings: Sequence[Standing], results: Sequence[TaskResult]) -> Choice:
    """Choose the cheapest variant within bounds, if it is cheaper than the full cache."""
    of_variant: dict[str, dict[str, TaskResult]] = {}
    for result in results:
        if result.n and result.cost is not None:
            of_variant.setdefault(result.variant, {})[result.task] = result
    full = next((of_variant[variant] for variant in of_variant if is_baseline(variant)), {})
    cheaper: dict[str, dict[str, float]] = {name: {} for name in _ORDER}
    for standing in standings:
        measured = of_variant.get(standing.variant, {})
        shared = [task for task in full if task in measured]
        cost, limit = (_cost(by, [of[task] for task in shared]) for of in (measured, full))
        if cost is not None and limit is not None and cost < limit:
            cheaper[standing.standing][standing.variant] = cost
    within, undecided = cheaper["within"], cheaper["undecided"]
    variant = min(within, key=within.__getitem__, default=None)
    lowest = math.inf if variant is None else within[variant]
    return Choice(
        by=by,
        variant=variant,
        cost=None if variant is None else lowest,
        full=_cost(by, list(full.values())),
        undecided=sorted(
            (name for name, cost in undecided.items() if cost < lowest), key=undecided.__getitem__
        ),
        speed=_speed(of_variant[variant]) if by == "time" and variant is not None else None,
    )


def _cost(by: By, results: Sequence[TaskResult]) -> float | None:
    """Return what a variant holds or reads, in bytes, or the seconds of a decoded token."""
    spent = spent_on(results)
    if spent is None or by == "bytes":
        return None if spent is None else spent.held_bytes
    if by == "traffic":
        return spent.traffic_bytes
    return 1 / spent.decode_rate if spent.decode_rate else None


def _speed(results: dict[str, TaskResult]) -> Interval | None:
    """Return the speed against the full cache's on the task where it is least sure."""
    speeds = [result.paired.speed for result in results.values() if result.paired is not None]
    known = [speed for speed in speeds if speed is not None]
    return min(known, key=lambda speed: speed.low, default=None)


Because = Literal["base", "best", "asked"]


def differences(
    results: Sequence[TaskResult], variants: Sequence[VariantEntry]
) -> list[Difference]:
    """Compare each variant under a budget with its base, or else with the best of its budget.

    No two variants are compared twice: a base that is second to its own variant has that row only.
    """
    compared = []
    for task in dict.fromkeys(result.task for result in results):
        of_task = {result.variant: result for result in results if result.task == task}
        partners = {each.name: _partner(each, variants, of_task) for each in variants}
        for variant, partner in partners.items():
            if partner is None or variant not in of_task:
                continue
            other, because = partner
            if because == "base" or partners.get(other) != (variant, "base"):
                compared.append(between(of_task[variant], of_task[other], because))
    return [each for each in compared if each is not None]


def between(ours: TaskResult, theirs: TaskResult, because: Because = "asked") -> Difference | None:
    """Subtract one result of a task from another's, over the samples that both have.

    Returns:
        None where the two may not be compared: no scores of samples, no shared sample, texts that
        were fed in other blocks, a score that is not finite.
    """
    if ours.scores is None or theirs.scores is None or not ours.fed_like(theirs):
        return None
    pairs = list(shared(ours.scores, theirs.scores))
    if not pairs:
        return None
    mine, others = zip(*pairs, strict=True)
    found = difference(mine, others, LINKS[theirs.scores.link])
    if not math.isfinite(found.value):
        return None
    return Difference(
        task=ours.task,
        variant=ours.variant,
        against=theirs.variant,
        because=because,
        n=len(pairs),
        difference=found.value,
        low=found.low,
        high=found.high,
        lower_is_better=ours.lower_is_better,
        deciding=found.deciding(len(pairs)),
        p=found.p,
    )


def shared(ours: SampleScores, theirs: SampleScores) -> Iterator[tuple[Part, Part]]:
    """Yield what each sample that both have gives to either score."""
    for mine, other in zip(parts_of(ours), parts_of(theirs), strict=True):
        if mine is not None and other is not None:
            yield mine, other


def parts_of(scores: SampleScores) -> list[Part | None]:
    """Return what each sample gives to a score, None where it has no result."""
    weights = [1.0] * len(scores.sums) if scores.weights is None else scores.weights
    return [
        None if total is None or weight is None else (total, weight)
        for total, weight in zip(scores.sums, weights, strict=True)
    ]


def _partner(
    variant: VariantEntry, variants: Sequence[VariantEntry], of_task: Mapping[str, TaskResult]
) -> tuple[str, Because] | None:
    """Name a variant's partner; None for one without a budget and for the best one."""
    if variant.budget is None:
        return None
    same = (variant.budget, variant.prefill, variant.planned)
    beside = [
        each
        for each in variants
        if (each.budget, each.prefill, each.planned) == same and each.name in of_task
    ]
    bases = [each for each in beside if _is_base(each.policy, variant.policy)]
    if bases:
        return max(bases, key=lambda each: len(split_outside(each.policy, "+"))).name, "base"
    scored = {each.name: of_task[each.name].value for each in beside}
    known = {name: value for name, value in scored.items() if value is not None}
    choose = min if any(result.lower_is_better for result in of_task.values()) else max
    best = choose(known, key=known.__getitem__, default=variant.name)
    return None if best == variant.name else (best, "best")


def _is_base(base: str, policy: str) -> bool:
    """Return whether a policy is another with fewer modifiers.

    >>> _is_base("h2o", "h2o+caote"), _is_base("h2o+ada", "h2o+caote"), _is_base("tova", "h2o")
    (True, False, False)
    """
    fewer, more = split_outside(base, "+"), split_outside(policy, "+")
    return fewer[0] == more[0] and set(fewer) < set(more)
