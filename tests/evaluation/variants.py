"""Variants from strings, as a recipe gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtool.planning import variants
from kvtool.policies.grammar import parse_policy
from kvtool.sizes import Budget


def make_variants(
    policies: Sequence[str], budgets: Sequence[str], **settings: Any
) -> list[variants.Variant]:
    """Read policies and budgets, and make variants of them."""
    read = [parse_policy(policy) for policy in policies]
    return variants.make_variants(read, [Budget.parse(budget) for budget in budgets], **settings)
