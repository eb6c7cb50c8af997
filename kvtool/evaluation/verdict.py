"""The verdict of a comparison: the cheapest variants that are as good as the full cache.

A variant is within X % if on every task the lower end of the paired 95 % interval of its score
against the full cache's is above -X % of the full cache's score (the upper end below +X %, where
smaller is better). Where only the difference itself is, more samples have to decide. Costs are
means over the samples of all tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from kvtool.documents.results import TaskResult, VariantEntry
from kvtool.documents.verdict import Choice, Interval, Standing, Verdict
from kvtool.errors import UsageError
from kvtool.evaluation.paired import LEAST_PAIRS
from kvtool.evaluation.run.collect import is_baseline

By = Literal["bytes", "traffic", "time"]
_ORDER = ("outside", "undecided", "within")  # the first of those on any task is the variant's


def check_within(within: float) -> float:
    """Return a bound in percent.

    Raises:
        UsageError: not above 0 and at most 100.
    """
    if not 0 < within <= 100:
        raise UsageError(f"--within must be above 0 and at most 100 (percent), got {within:g}")
    return within


def make_verdict(
    results: Sequence[TaskResult], variants: Sequence[VariantEntry], within: float
) -> Verdict | None:
    """Hold every variant against the full cache; None where nothing has been measured.

    Args:
        within: percent of the full cache's score.
    """
    if not any(result.n for result in results):
        return None
    full = {each.task: each for each in results if is_baseline(each.arm)}
    tasks = [task for task, result in full.items() if result.droppable and result.value]
    others = [variant.name for variant in variants if not is_baseline(variant.name)]
    if why := _why_none(full, tasks, others):
        return Verdict(within=within, why=why, tasks=tasks, arms=[], choices=[])
    found = {(result.arm, result.task): result for result in results}
    standings = [
        _worst(
            [_standing(found.get((variant, task)), full[task], variant, within) for task in tasks]
        )
        for variant in others
    ]
    choices = [_choice(by, standings, results) for by in _COSTS]
    return Verdict(within=within, why=None, tasks=tasks, arms=standings, choices=choices)


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
    """Hold one variant against the full cache on one task."""
    pair, why = None if result is None else result.paired, _why_undecided(result, full)
    gain = low = high = None
    if result is not None and pair is not None and pair.full != 0:
        gain, low, high = pair.percent(lower_is_better=result.lower_is_better)
    standing: Literal["within", "undecided", "outside"] = "undecided"
    if gain is not None and gain <= -within:
        standing = "outside"
    elif why is None and low is not None and low > -within:
        standing = "within"
    return Standing(
        arm=variant,
        standing=standing,
        task=full.task,
        n=0 if pair is None else pair.n,
        difference=gain,
        low=low,
        high=high,
        why=why,
    )


def _why_undecided(result: TaskResult | None, full: TaskResult) -> str | None:
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
    """Return that of the task on which a variant stands worst."""

    def rank(standing: Standing) -> tuple[int, float]:
        known = [each for each in (standing.low, standing.difference) if each is not None]
        return _ORDER.index(standing.standing), min(known, default=-100.0)

    return min(standings, key=rank)


def _choice(by: By, standings: Sequence[Standing], results: Sequence[TaskResult]) -> Choice:
    """Choose the cheapest variant within bounds, if it is cheaper than the full cache."""
    of_variant: dict[str, dict[str, TaskResult]] = {}
    for result in results:
        if result.cost is not None:
            of_variant.setdefault(result.arm, {})[result.task] = result
    full = next((of_variant[variant] for variant in of_variant if is_baseline(variant)), {})
    cheaper: dict[str, dict[str, float]] = {name: {} for name in _ORDER}
    for standing in standings:
        measured = of_variant.get(standing.arm, {})
        shared = [task for task in full if task in measured]
        cost, limit = (_COSTS[by]([of[task] for task in shared]) for of in (measured, full))
        if cost is not None and limit is not None and cost < limit:
            cheaper[standing.standing][standing.arm] = cost
    within, undecided = cheaper["within"], cheaper["undecided"]
    variant = min(within, key=within.__getitem__, default=None)
    lowest = None if variant is None else within[variant]
    return Choice(
        by=by,
        arm=variant,
        cost=lowest,
        full=_COSTS[by](list(full.values())),
        undecided=[
            name
            for name in sorted(undecided, key=undecided.__getitem__)
            if lowest is None or undecided[name] < lowest
        ],
        speed=_speed(of_variant[variant]) if by == "time" and variant is not None else None,
    )


def _mean(results: Sequence[TaskResult], of: Callable[[TaskResult], float]) -> float | None:
    """Return the mean over all samples of all tasks."""
    count = sum(result.n for result in results)
    return sum(result.n * of(result) for result in results) / count if count else None


def _held(results: Sequence[TaskResult]) -> float | None:
    return _mean(results, lambda result: result.cost.held_bytes if result.cost else 0.0)


def _read(results: Sequence[TaskResult]) -> float | None:
    return _mean(results, lambda result: result.cost.traffic_bytes if result.cost else 0.0)


def _seconds(results: Sequence[TaskResult]) -> float | None:
    """Return the seconds of a decoded token: all seconds over all tokens."""
    seconds = tokens = 0.0
    for result in results:
        if result.cost is not None and result.cost.decode_tokens_per_s:
            seconds += result.n * result.cost.decode_s
            tokens += result.n * result.cost.decode_s * result.cost.decode_tokens_per_s
    return seconds / tokens if tokens else None


_COSTS: dict[By, Callable[[Sequence[TaskResult]], float | None]] = {
    "bytes": _held,
    "traffic": _read,
    "time": _seconds,
}


def _speed(results: dict[str, TaskResult]) -> Interval | None:
    """Return the speed against the full cache's on the task where it is least sure."""
    speeds = [result.paired.speed for result in results.values() if result.paired is not None]
    known = [speed for speed in speeds if speed is not None]
    return min(known, key=lambda speed: speed.low, default=None)
