"""Arms from strings, as a recipe gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtool.evaluation.bench import arms
from kvtool.policies.grammar import parse_policy
from kvtool.sizes import Budget


def make_arms(policies: Sequence[str], budgets: Sequence[str], **settings: Any) -> list[arms.Arm]:
    """Read policies and budgets, and make arms of them."""
    read = [parse_policy(policy) for policy in policies]
    return arms.make_arms(read, [Budget.parse(budget) for budget in budgets], **settings)
