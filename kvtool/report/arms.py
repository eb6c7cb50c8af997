"""Arms and tasks in the order in which people read them: by policy, budgets ascending."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from kvtool.documents.results import ArmEntry, ResultsDocument, TaskResult
from kvtool.sizes import Budget

FULL = "full"


@dataclass(frozen=True)
class Family:
    """The arms of one policy, budgets ascending; `label` is what a legend calls them."""

    label: str
    arms: tuple[ArmEntry, ...]

    @property
    def is_full(self) -> bool:
        """Whether this is the arm that keeps everything."""
        return self.arms[0].policy == FULL


def families(document: ResultsDocument) -> list[Family]:
    """Group arms by policy, in order of appearance, the full cache first.

    Arms that differ in the prefill only are families of their own, and say so.
    """
    several = len({arm.prefill for arm in document.arms if arm.policy != FULL}) > 1
    groups: dict[str, list[ArmEntry]] = {}
    for arm in sorted(document.arms, key=lambda arm: arm.policy != FULL):
        told = several and arm.policy != FULL
        label = f"{arm.policy}, prefill {arm.prefill}" if told else arm.policy
        groups.setdefault(label, []).append(arm)
    return [
        Family(label, tuple(sorted(arms, key=lambda arm: budget_order(arm.budget))))
        for label, arms in groups.items()
    ]


def arms_in_order(document: ResultsDocument) -> list[ArmEntry]:
    """Return every arm, family by family."""
    return [arm for family in families(document) for arm in family.arms]


def full_arm(document: ResultsDocument) -> ArmEntry | None:
    """Return the arm that others are held against."""
    return next((arm for arm in document.arms if arm.policy == FULL), None)


def task_names(document: ResultsDocument) -> list[str]:
    """Return the tasks in order of appearance, those of a suite beside each other."""
    names = list(dict.fromkeys(result.task for result in document.results))
    suites = list(dict.fromkeys(suite(name) for name in names))
    return sorted(names, key=lambda name: suites.index(suite(name)))


def wrap(name: str, width: int) -> str:
    """Break the name of a policy or an arm where its parts begin, lines at most `width` long.

    >>> print(wrap("snapkv(window=16,kernel=5)+caote@64", 18))
    snapkv(window=16,
    kernel=5)+caote@64
    """
    lines = [""]
    for part in re.split(r"(?<=,)|(?=[+@(])", name):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line[i : i + width] for line in lines for i in range(0, len(line), width))


def suite(task: str) -> str:
    """Return `ruler` for `ruler/vt`."""
    return task.partition("/")[0]


def results_of(document: ResultsDocument, task: str) -> list[TaskResult]:
    """Return what the arms scored on one task, arms in order; arms without a result are skipped."""
    found = (document.of(arm.name, task) for arm in arms_in_order(document))
    return [result for result in found if result is not None]


def budget_size(budget: int | str) -> tuple[str, Fraction]:
    """Return a budget's unit and size.

    >>> budget_size("20%")
    ('ratio', Fraction(1, 5))
    """
    parsed = Budget.parse(budget)
    for unit in ("tokens", "ratio"):
        if (size := getattr(parsed, unit)) is not None:
            return unit, Fraction(size)
    return "bytes", Fraction(parsed.bytes or 0)


def budget_order(budget: int | str | None) -> tuple[str, Fraction]:
    """Return what budgets are sorted by; an arm without a budget comes first."""
    return ("", Fraction(0)) if budget is None else budget_size(budget)
