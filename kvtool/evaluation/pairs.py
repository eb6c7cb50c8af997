"""Resolve and compare the pairs of variants that a user asks for, such as `mine,h2o`.

The p-value of a pair belongs to its interval: the smallest level at which the percentile interval
of the paired bootstrap leaves out 0. Holm's step-down procedure (A simple sequentially rejective
multiple test procedure, Scandinavian Journal of Statistics 6, 1979) bounds the chance that any of
the comparisons is called better or worse by luck alone, whatever they have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from kvtool.documents.results import ResultsDocument, VariantEntry
from kvtool.documents.verdict import Difference
from kvtool.errors import UsageError, did_you_mean, quote
from kvtool.evaluation.verdict import between
from kvtool.planning.variants import Variant
from kvtool.policies.grammar import label_of, parse_policy
from kvtool.policies.spelling import part_name, spell_settings, split_outside

Pair = tuple[VariantEntry, VariantEntry]


def variant_entry(variant: Variant) -> VariantEntry:
    """Describe a variant in a document."""
    size = variant.budget
    budget = None if size is None else size.tokens if size.tokens is not None else str(size)
    codec, label = variant.policy.codec, label_of(variant.policy)
    return VariantEntry(
        name=variant.name,
        policy=str(variant.policy),
        budget=budget,
        prefill=variant.prefill,
        planned=variant.plan is not None,
        reads=variant.budget is not None and variant.policy.budget_is_traffic,
        codec=None if codec is None else part_name(codec) + spell_settings(codec),
        label=None if label == str(variant.policy) else label,
    )


def asked_pairs(texts: Sequence[str], variants: Sequence[VariantEntry]) -> list[Pair]:
    """Return the variants that pairs such as `mine,h2o` or `h2o@64,tova@64` name.

    Two policies are compared at each budget that both have; one that keeps everything is compared
    with the other at each of its budgets.

    Raises:
        UsageError: a text that names no two variants of the run, or two without a common budget.
    """
    return list(dict.fromkeys(pair for text in texts for pair in _pairs(text, variants)))


def _pairs(text: str, variants: Sequence[VariantEntry]) -> list[Pair]:
    names = [part.strip() for part in split_outside(text, ",")]
    if len(names) != 2 or not all(names):
        raise UsageError(
            f"--compare takes two policies or variants, got {quote(text)}",
            hint="--compare mine,h2o",
        )
    ours, theirs = (_named(name, variants) for name in names)
    one_each = len(ours) == len(theirs) == 1
    found = [
        (mine, other)
        for mine, other in product(ours, theirs)
        if mine is not other and (one_each or _fit(mine, other))
    ]
    if not found:
        raise UsageError(f"--compare {quote(text)} names no two variants of one budget")
    return found


def _fit(mine: VariantEntry, other: VariantEntry) -> bool:
    if None in (mine.budget, other.budget):
        return True
    return (mine.budget, mine.planned) == (other.budget, other.planned)


def _named(name: str, variants: Sequence[VariantEntry]) -> list[VariantEntry]:
    """Return the variants of a policy, or the one of that name."""
    wanted = {name, _spelled(name)}
    found = [each for each in variants if wanted & {each.name, each.shown, each.policy, each.label}]
    if not found:
        known = list(dict.fromkeys(each.label or each.policy for each in variants))
        raise UsageError(
            f"--compare names {quote(name)}, and this run has {', '.join(known)}",
            hint=did_you_mean(name, known),
        )
    return found


def _spelled(name: str) -> str:
    """Spell a policy, or the policy of a variant, as tables do; a label stays as it is."""
    policy, at, rest = name.partition("@")
    try:
        return f"{parse_policy(policy, imports=False)}{at}{rest}"
    except UsageError:
        return name


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
