"""Variants and tasks in the order in which people read them, under the labels of their policies."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtool.sizes import budget_order

if TYPE_CHECKING:
    from kvtool.documents.results import ResultsDocument, TaskResult, VariantEntry

FULL = "full"


@dataclass(frozen=True)
class Family:
    """The variants of one policy, budgets ascending; `label` is what a legend calls them."""

    label: str
    variants: tuple[VariantEntry, ...]

    @property
    def is_full(self) -> bool:
        """Whether this is the variant that keeps everything."""
        return self.variants[0].policy == FULL

    @property
    def codec(self) -> str | None:
        """The format that keys and values are stored in; None: the model's own."""
        return self.variants[0].codec

    @property
    def base(self) -> str:
        """The label without the codec, which is equal where policies differ in bits only."""
        return self.label if self.codec is None else self.label.replace(f"+{self.codec}", "", 1)

    @property
    def reads(self) -> bool:
        """Whether the budget is what a decoded token reads, and not what is stored."""
        return any(variant.reads for variant in self.variants)

    @property
    def long_label(self) -> str:
        """The label, and whether the budget is read."""
        return f"{self.label} (budget is read)" if self.reads else self.label


def families(document: ResultsDocument) -> list[Family]:
    """Group variants by policy, in order of appearance, the full cache first.

    Variants that differ only in the prefill form families of their own, whose labels say so.
    """
    several = len({variant.prefill for variant in document.variants if variant.policy != FULL}) > 1
    groups: dict[str, list[VariantEntry]] = {}
    for variant in sorted(document.variants, key=lambda variant: variant.policy != FULL):
        named = several and variant.policy != FULL
        label = f"{variant.policy}, prefill {variant.prefill}" if named else variant.policy
        groups.setdefault(label, []).append(variant)
    return [
        Family(label, tuple(sorted(variants, key=lambda variant: budget_order(variant.budget))))
        for label, variants in groups.items()
    ]


def variants_in_order(document: ResultsDocument) -> list[VariantEntry]:
    """Return every variant, family by family."""
    return [variant for family in families(document) for variant in family.variants]


def full_variant(document: ResultsDocument) -> VariantEntry | None:
    """Return the variant that others are compared with."""
    return next((variant for variant in document.variants if variant.policy == FULL), None)


def fed_like_full(document: ResultsDocument, result: TaskResult) -> bool:
    """Return whether a result was fed like the full cache's, so that both compare."""
    full = full_variant(document)
    theirs = None if full is None else document.of(full.name, result.task)
    return theirs is None or result.fed_like(theirs)


def task_names(document: ResultsDocument) -> list[str]:
    """Return the tasks in order of appearance, those of a suite beside each other."""
    names = list(dict.fromkeys(result.task for result in document.results))
    suites = list(dict.fromkeys(suite(name) for name in names))
    return sorted(names, key=lambda name: suites.index(suite(name)))


def wrap(name: str, width: int) -> str:
    """Break the name of a policy or a variant where its parts begin, at about `width` letters.

    A part, such as the name of a score, is never broken.

    >>> print(wrap("snapkv(window=16,kernel=5)+caote@64", 18))
    snapkv(window=16,
    kernel=5)+caote@64
    """
    lines = [""]
    for part in re.split(r"(?<=,)|(?=[+@(])", name):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def suite(task: str) -> str:
    """Return `ruler` for `ruler/vt`."""
    return task.partition("/")[0]


def results_of(document: ResultsDocument, task: str) -> list[TaskResult]:
    """Return the results of one task in the order of the variants, as far as there are any."""
    found = (document.of(variant.name, task) for variant in variants_in_order(document))
    return [result for result in found if result is not None]


def labels(document: ResultsDocument) -> dict[str, str]:
    """Return variants and policies that have labels; two of one label keep their full names."""
    shown = {each.name: each.shown for each in document.variants}
    often = Counter(shown.values())
    found: dict[str, str] = {}
    for each in document.variants:
        if each.label is not None and often[each.shown] == 1:
            found |= {each.name: each.shown, each.policy: each.label}
    return found


def labelled(document: ResultsDocument) -> ResultsDocument:
    """Return the document with labels in place of policies of other modules."""
    named = labels(document)
    if not named:
        return document
    shown = {"variants", "results", "averages", "gates", "differences", "verdict", "claim_verdict"}

    def renamed(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: renamed(each) for key, each in part.items()}
        if isinstance(part, list):
            return [renamed(each) for each in part]
        return named.get(part, part) if isinstance(part, str) else part

    parts = renamed(document.model_dump(include=shown))
    return type(document).model_validate(document.model_dump() | parts)
