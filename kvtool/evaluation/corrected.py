"""Compare the pairs that a user asks for, with p-values corrected for their number.

The p-value of a pair belongs to its interval: the smallest level at which the percentile interval
of the paired bootstrap leaves out 0. Holm's step-down procedure (A simple sequentially rejective
multiple test procedure, Scandinavian Journal of Statistics 6, 1979) bounds the chance that any of
the comparisons is called better or worse by luck alone, whatever they have in common.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.documents.results import ResultsDocument
from kvtool.documents.verdict import Difference
from kvtool.evaluation.pairs import asked_pairs
from kvtool.evaluation.verdict import between


def compare(document: ResultsDocument, texts: Sequence[str]) -> list[Difference]:
    """Compare pairs such as `mine,h2o` on every task; all of them together are corrected.

    Raises:
        UsageError: a text that names no two variants of the run.
    """
    found = []
    for ours, theirs in asked_pairs(texts, document.variants):
        for task in dict.fromkeys(result.task for result in document.results):
            mine, other = document.of(ours.name, task), document.of(theirs.name, task)
            if mine is not None and other is not None:
                found.append(between(mine, other))
    return corrected([each for each in found if each is not None])


def corrected(found: Sequence[Difference]) -> list[Difference]:
    """Fill in Holm's corrected p-values; a difference without a p-value counts as none."""
    known = [each.p for each in found if each.p is not None]
    by_holm = iter(holm(known))
    return [
        each
        if each.p is None
        else each.model_copy(update={"p_holm": next(by_holm), "comparisons": len(known)})
        for each in found
    ]


def holm(values: Sequence[float]) -> list[float]:
    """Correct p-values for their number, in the order in which they come.

    The smallest of n is multiplied by n, the next one by n - 1, and so on; none becomes smaller
    than one before it, or larger than 1.

    >>> holm([0.04, 0.01, 0.03])
    [0.06, 0.03, 0.06]
    """
    made, largest = [0.0] * len(values), 0.0
    order = sorted(range(len(values)), key=lambda place: values[place])
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        made[place] = largest
    return made
