"""Arms held against each other sample by sample, from a document of results alone.

Each arm is held against its base, the same policy with fewer modifiers, where the run has that at
the same budget; else against the arm of that budget with the best score. Intervals are not widened
for the number of arms: of twenty arms of equal truth, one is expected to fall outside the noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from kvtool.documents.results import TaskResult, VariantEntry
from kvtool.documents.verdict import Difference, SampleScores
from kvtool.evaluation.metrics.summary import LINKS, Part
from kvtool.evaluation.paired import difference
from kvtool.policies.spelling import split_outside

Because = Literal["base", "best", "asked"]


def differences(
    results: Sequence[TaskResult], variants: Sequence[VariantEntry]
) -> list[Difference]:
    """Hold each arm under a budget against its base, or else against the best of its budget.

    No two arms are compared twice: a base that is second to its own variant has that row only.
    """
    found = {(result.arm, result.task): result for result in results}
    named = {variant.name: variant for variant in variants}
    compared = []
    for task in dict.fromkeys(result.task for result in results):
        of_task = {
            variant.name: found[variant.name, task]
            for variant in variants
            if (variant.name, task) in found
        }
        partners = {name: _partner(variant, variants, of_task) for name, variant in named.items()}
        for variant, partner in partners.items():
            if partner is None or variant not in of_task:
                continue
            other, because = partner
            back = partners.get(other)
            if because == "best" and back is not None and back == (variant, "base"):
                continue
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
        arm=ours.arm,
        against=theirs.arm,
        because=because,
        n=len(pairs),
        difference=found.value,
        low=found.low,
        high=found.high,
        lower_is_better=ours.lower_is_better,
        deciding=found.deciding(len(pairs)),
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
    """Name what an arm is held against; None for one without a budget and for the best one."""
    if variant.budget is None:
        return None
    beside = [
        each
        for each in variants
        if (each.budget, each.prefill, each.planned)
        == (variant.budget, variant.prefill, variant.planned)
        and each.name in of_task
    ]
    bases = [each for each in beside if _is_base(each.policy, variant.policy)]
    if bases:
        return max(bases, key=lambda each: len(split_outside(each.policy, "+"))).name, "base"
    scored = [each.name for each in beside if of_task[each.name].value is not None]
    best = max(scored, key=lambda name: _goodness(of_task[name]), default=variant.name)
    return None if best == variant.name else (best, "best")


def _is_base(base: str, policy: str) -> bool:
    """Tell whether a policy is another with fewer modifiers.

    >>> _is_base("h2o", "h2o+caote"), _is_base("h2o+ada", "h2o+caote"), _is_base("tova", "h2o")
    (True, False, False)
    """
    fewer, more = split_outside(base, "+"), split_outside(policy, "+")
    return fewer[0] == more[0] and set(fewer) < set(more)


def _goodness(result: TaskResult) -> float:
    assert result.value is not None, "asked of results with a score only"
    return -result.value if result.lower_is_better else result.value
