"""Guarantee at 95 % confidence that a policy loses few of the answers that the full cache gives.

The loss of a context is what the full cache scores above the variant, as a share of a perfect
score, in the mean over its samples: a gain pays for no loss. The mean loss is tested by the exact
binomial where scores are right or wrong, else by the inequality of Hoeffding and Bentkus (Bates et
al., Distribution-Free, Risk-Controlling Prediction Sets, 2021). Budgets fixed before the run are
tested from the largest down to the first that fails, without correction (fixed sequence testing:
Angelopoulos et al., Learn then Test, 2021). Policies share the 5 %; of several tasks all must pass.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING

from kvtool.documents.results import SamplesDocument, TaskResult, TaskSamples, VariantEntry
from kvtool.documents.verdict import Bounded, Guarantee, Verdict
from kvtool.errors import UsageError
from kvtool.evaluation.run.collect import is_baseline
from kvtool.evaluation.verdict import shared, why_undecided
from kvtool.sizes import budget_order

if TYPE_CHECKING:
    from kvtool.evaluation.run.runner import Job

_RISK = 0.05
_FAR = 1e-9  # by which a sum of shares may miss a whole number


def chance_of(lost: float, n: int, bound: float, *, counted: bool) -> float:
    """Return the p-value of a sum of `n` losses if their mean is a bound; counted: 0 or 1 each."""
    if counted:
        return _at_most(round(lost), n, bound)
    if (mean := lost / n) >= bound:
        return 1.0
    bits = (1 - mean) * math.log((1 - mean) / (1 - bound))
    bits += mean * math.log(mean / bound) if mean else 0.0
    return min(math.exp(-n * bits), math.e * _at_most(math.ceil(lost - _FAR), n, bound))


def _at_most(k: int, n: int, chance: float) -> float:
    """Return how likely at most `k` of `n` trials succeed."""
    odds, none = math.log(chance) - math.log1p(-chance), n * math.log1p(-chance)
    logs = accumulate((odds + math.log((n - i) / (i + 1)) for i in range(k)), initial=none)
    return min(1.0, math.fsum(map(math.exp, logs)))


def largest_loss(lost: float, n: int, level: float, *, counted: bool) -> float:
    """Return the smallest bound that passes at a level; Clopper and Pearson's, if counted."""
    bounds, least = range(round(1 / _FAR)), int(lost / n / _FAR) + 1
    found = bisect_left(
        bounds, -level, least, key=lambda i: -chance_of(lost, n, i * _FAR, counted=counted)
    )
    return min(1.0, found * _FAR)


def needed_contexts(bound: float, level: float = _RISK) -> int:
    """Return how many contexts pass if nothing is lost on them: 59 of a bound of 0.05."""
    return math.ceil(math.log(level) / math.log1p(-bound))


def check_guarantee(loss: float, jobs: Sequence[Job], variants: Sequence[VariantEntry]) -> None:
    """Refuse a guarantee that a run cannot give, whatever its answers.

    Raises:
        UsageError: nothing to compare, a task without right answers or a best score, few contexts.
    """
    policies = len(_walks(variants))
    if not policies or not any(is_baseline(each.name) for each in variants):
        raise UsageError("--guarantee compares policies with the full cache", hint="--baseline")
    needed = needed_contexts(loss / 100, _RISK / policies)
    for task, n in ((job.task, len(set(job.contexts))) for job in jobs):
        if not task.right_answers or task.lower_is_better or not task.best:
            raise UsageError(
                f"--guarantee: {task.name} has no score from 0 to that of right answers"
            )
        if n < needed:
            raise UsageError(
                f"--guarantee {loss:g} takes {needed} contexts of each task if none is lost "
                f"(policies: {policies}); {task.name} has {n}",
                hint="more --samples, which count for each length and depth",
            )


def with_guarantee(
    verdict: Verdict | None, results: Sequence[TaskResult], index: SamplesDocument
) -> Verdict | None:
    """Return a verdict with the guarantee that was asked for before the run, if one was."""
    if verdict is None or verdict.why is not None or (loss := index.guarantee) is None:
        return verdict
    tasks = [each for each in index.tasks if each.task in verdict.tasks]
    walks = _walks(index.variants)
    level, chain = _RISK / len(walks), list[Bounded]()
    of_cell = _RISK / sum(map(len, walks)) / len(tasks)
    for walk in walks:
        passed = True
        for name in walk:
            found = [_tested(name, task, results, loss / 100, of_cell) for task in tasks]
            worst = max(found, key=lambda each: each.p)
            passed = passed and worst.p <= level
            chain.append(worst.model_copy(update={"passed": passed}))
    guarantee = Guarantee(loss=loss, level=level, chain=chain)
    return verdict.model_copy(update={"guarantee": guarantee})


def _walks(variants: Sequence[VariantEntry]) -> list[list[str]]:
    """Return each policy's variants from the largest budget down."""
    walks = defaultdict[str, list[str]](list, {each.policy: [] for each in variants})
    for each in sorted(variants, key=lambda each: budget_order(each.budget), reverse=True):
        if not is_baseline(each.name):
            walks[each.policy].append(each.name)
    return list(filter(None, walks.values()))


def _tested(
    variant: str, task: TaskSamples, results: Sequence[TaskResult], bound: float, level: float
) -> Bounded:
    """Test one variant on one task; `level` is that of the bound which is reported."""
    of_task = {each.variant: each for each in results if each.task == task.task}
    full = next(each for each in of_task.values() if is_baseline(each.variant))
    result, found = of_task.get(variant), Bounded(variant=variant, task=task.task)
    why = why_undecided(result, full)
    if result is None or result.scores is None or full.scores is None or why is not None:
        return found.model_copy(update={"why": why})
    if min(result.n, full.n, len(task.contexts)) < (planned := len(task.samples)):
        return found.model_copy(update={"why": "the run is not complete"})
    best, losses = full.best or 1.0, defaultdict[int, list[float]](list)
    pairs = zip(task.contexts, shared(result.scores, full.scores), strict=False)
    for context, ((ours, weight), (theirs, other)) in pairs:
        losses[context].append(min(1.0, max(0.0, theirs / other - ours / weight) / best))
    n, lost = len(losses), math.fsum(map(fmean, losses.values()))
    scores = {total for each in of_task.values() if each.scores for total in each.scores.sums}
    counted = n == planned and scores <= {0.0, best, None}
    update = {"n": n, "lost": lost, "counted": counted}
    update["p"] = chance_of(lost, n, bound, counted=counted)
    update["bound"] = 100 * largest_loss(lost, n, level, counted=counted)
    return found.model_copy(update=update)
