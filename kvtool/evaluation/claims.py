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
from kvtool.documents.results import ResultsDocument, TaskResult, VariantEntry
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
    columns = [*here.columns, *(there.columns if there else ())]
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
        lower_is_better=here.lower_is_better,
        best=here.best,
        deciding=found.deciding(len(known)) if pair.margin is None else None,
        control=pair.control,
        verdict=_verdict(found, -margin, flipped=here.lower_is_better),
    )


@dataclass(frozen=True)
class _Measured:
    """What the samples gave the two policies of a pair, `columns`, added up over budgets."""

    columns: tuple[list[Part | None], list[Part | None]]
    budgets: list[str]
    link: str
    lower_is_better: bool
    best: float | None


def _measured(
    pair: ClaimedPair, wanted: Sequence[int | str], task: str, document: ResultsDocument
) -> _Measured | None:
    """Collect the samples at those of the budgets at which both policies were measured."""
    together = [
        (ours, theirs, budget)
        for budget in _budgets(pair, wanted, document)
        if (ours := _result(document, pair.variant, budget, task)) is not None
        and (theirs := _result(document, pair.than, budget, task)) is not None
        and ours.fed_like(theirs)
    ]
    if not together:
        return None
    ours, theirs, _ = together[0]
    assert theirs.scores is not None
    return _Measured(
        (_summed([each[0] for each in together]), _summed([each[1] for each in together])),
        [budget for *_, budget in together if budget],
        theirs.scores.link,
        ours.lower_is_better,
        ours.best,
    )


def _budgets(
    pair: ClaimedPair, wanted: Sequence[int | str], document: ResultsDocument
) -> list[str]:
    """Return the budgets to compare at, one without a name where neither policy takes any."""
    if {pair.variant, pair.than} <= {
        variant.policy for variant in document.variants if variant.budget is None
    }:
        return [""]
    budgets = dict.fromkeys(
        str(variant.budget) for variant in document.variants if variant.budget is not None
    )
    named = {str(budget) for budget in wanted}
    return [budget for budget in budgets if not named or budget in named]


def _verdict(found: Estimate, least: float, *, flipped: bool) -> Verdict:
    """Say whether an interval lies above `least`, below it, or on both sides."""
    if found.low is None or found.high is None:
        return "undecided"
    low, high = (-found.high, -found.low) if flipped else (found.low, found.high)
    if low > least:
        return "holds"
    return "fails" if high < least else "undecided"


def _result(document: ResultsDocument, policy: str, budget: str, task: str) -> TaskResult | None:
    """Return the result of a policy at a budget, or without one where it takes none."""

    def is_it(variant: VariantEntry) -> bool:
        return variant.policy == policy and (
            variant.budget is None or str(variant.budget) == budget
        )

    variant = next(filter(is_it, document.variants), None)
    result = None if variant is None else document.of(variant.name, task)
    return result if result is not None and result.scores is not None else None


def _summed(results: Sequence[TaskResult]) -> list[Part | None]:
    """Add up what each sample gives over several results; None where one lacks it."""
    columns = [parts_of(result.scores) for result in results if result.scores is not None]
    return [_sum(parts) for parts in zip(*columns, strict=True)]


def _sum(parts: Sequence[Part | None]) -> Part | None:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return math.fsum(part[0] for part in known), math.fsum(part[1] for part in known)
