"""Judge a claim by a run's document of results.

Each pair of policies is compared once on each task: a sample's score is its mean over the budgets
that count, so that all budgets give one interval. A pair holds where the whole interval lies above
0 (above the margin's end, where there is one), fails where it lies below, and is undecided between.
A pair with `than_at` compares two differences, at some budgets and at others, in the same way.
Intervals are not widened for the number of comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvtool.documents.claim import Claim, ClaimedPair, ClaimRow, ClaimVerdict
from kvtool.documents.results import ResultsDocument, TaskResult
from kvtool.evaluation.metrics.summary import LINKS, Part
from kvtool.evaluation.verdict import Estimate, difference, excess, mean_of, parts_of

Verdict = Literal["holds", "fails", "undecided"]


def judge_claim(claim: Claim, document: ResultsDocument) -> ClaimVerdict | None:
    """Check a claim by a run; None where none of its pairs was measured."""
    tasks = dict.fromkeys(result.task for result in document.results)
    found = [_row(pair, task, document) for pair in claim.pairs for task in tasks]
    return joined([row for row in found if row is not None])


def joined(rows: list[ClaimRow]) -> ClaimVerdict | None:
    """Return what comparisons say together; None where none but controls are there."""
    some = {row.verdict for row in rows if not row.control}
    if not some:
        return None
    if {"holds", "fails"} <= some:
        return ClaimVerdict(verdict="holds in part", rows=rows)
    one = next((each for each in ("holds", "fails") if each in some), "undecided")
    return ClaimVerdict(verdict=one, rows=rows)  # type: ignore[arg-type]  # one of the literals


def _row(pair: ClaimedPair, task: str, document: ResultsDocument) -> ClaimRow | None:
    """Compare a pair on a task; None where either has no score of its samples."""
    here = _measured(pair, pair.budgets, task, document)
    there = _measured(pair, pair.than_at, task, document) if pair.than_at else None
    if here is None or (pair.than_at and there is None):
        return None
    sides = [here, there] if there else [here]
    columns = [column for side in sides for column in (side.ours, side.theirs)]
    known = [parts for parts in zip(*columns, strict=True) if None not in parts]
    if not known:
        return None
    mine, others, *elsewhere = zip(*known, strict=True)
    link = LINKS[here.link]
    if elsewhere:
        mine_there, others_there = elsewhere
        value = difference(mine_there, others_there, link).value
        found = excess((mine, others), (mine_there, others_there), link)
    else:
        value, found = link(mean_of(others)), difference(mine, others, link)
    if not (math.isfinite(found.value) and math.isfinite(value)):
        return None
    margin = 0.0 if pair.margin is None else abs(value) * pair.margin / 100
    return ClaimRow(
        variant=pair.variant,
        than=pair.than,
        task=task,
        budgets=here.budgets,
        than_at=there.budgets if there else [],
        margin=pair.margin,
        n=len(known),
        than_value=value,
        difference=found.value,
        low=found.low,
        high=found.high,
        lower_is_better=here.some.lower_is_better,
        best=here.some.best,
        deciding=found.deciding(len(known)) if pair.margin is None else None,
        control=pair.control,
        verdict=_verdict(found, -margin, flipped=here.some.lower_is_better),
    )


@dataclass(frozen=True)
class _Measured:
    """What the samples gave the two policies of a pair, added up over budgets."""

    ours: list[Part | None]
    theirs: list[Part | None]
    budgets: list[str]
    link: str
    some: TaskResult


def _measured(
    pair: ClaimedPair, wanted: Sequence[int | str], task: str, document: ResultsDocument
) -> _Measured | None:
    """Collect the samples at those of the budgets at which both policies were measured.

    The budget has no name where neither policy takes any.
    """
    mine, other = (_by_budget(document, name, task) for name in (pair.variant, pair.than))
    budgets = dict.fromkeys(str(each.budget) for each in document.variants if each.budget)
    named, together = {str(budget) for budget in wanted}, {}
    for budget in [""] if mine.keys() | other.keys() == {""} else budgets:
        ours, theirs = mine.get(budget, mine.get("")), other.get(budget, other.get(""))
        if ours is None or theirs is None or not ours.fed_like(theirs):
            continue
        if not budget or not named or budget in named:
            together[budget] = ours, theirs
    if not together:
        return None
    both = list(zip(*together.values(), strict=True))
    (ours, theirs), *_ = together.values()
    link = "mean" if theirs.scores is None else theirs.scores.link
    mine_summed, others_summed = map(_summed, both)
    return _Measured(mine_summed, others_summed, list(filter(None, together)), link, ours)


def _by_budget(document: ResultsDocument, policy: str, task: str) -> dict[str, TaskResult]:
    """Return the results of a policy with scores of samples, by budget; "" where it takes none."""
    found: dict[str, TaskResult] = {}
    for variant in document.variants:
        result = document.of(variant.name, task)
        if variant.policy == policy and result is not None and result.scores is not None:
            found.setdefault("" if variant.budget is None else str(variant.budget), result)
    return found


def _verdict(found: Estimate, least: float, *, flipped: bool) -> Verdict:
    """Say whether an interval lies above `least`, below it, or on both sides."""
    if found.low is None or found.high is None:
        return "undecided"
    low, high = (-found.high, -found.low) if flipped else (found.low, found.high)
    if low > least:
        return "holds"
    return "fails" if high < least else "undecided"


def _summed(results: Sequence[TaskResult]) -> list[Part | None]:
    """Add up what each sample gives over several results; None where one lacks it."""
    columns = [parts_of(result.scores) for result in results if result.scores is not None]
    return [
        None if None in parts else (math.fsum(p[0] for p in parts), math.fsum(p[1] for p in parts))
        for parts in zip(*columns, strict=True)
    ]
