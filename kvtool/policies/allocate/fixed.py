"""KV heads whose budgets are known before any text is read: a plan's, or of one head alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from kvtool.errors import UsageError
from kvtool.maths.allocation import allocate_by_counts
from kvtool.policies.allocate.head_split import HeadSplit
from kvtool.policies.allocate.problem import UNLIMITED
from kvtool.policies.policy import Policy

_HINT = "--allocator optimal plans layers alone"


@dataclass(frozen=True)
class PlannedHeads(HeadSplit):
    """The tokens that a plan gives to each KV head.

    Args:
        heads: tokens of each head of every layer whose budget is free, in order.
        least: tokens that a head keeps at least where a short prompt changes the budget.
    """

    heads: tuple[tuple[int, ...], ...] = ()
    least: int = 1

    name: ClassVar = "optimal(heads=true)"
    paper: ClassVar = "-"
    fixed: ClassVar = True

    def forecast(
        self, budget: int, prompt: int, kv_heads: int, place: tuple[int, int]
    ) -> list[int]:
        """Count the tokens of each head: as planned, or in proportion where the layer has others.

        A head keeps no more than the prompt; what it cannot hold goes to the others of its layer.
        """
        if prompt <= budget:
            return [budget] * kv_heads
        return list(_scaled(self.heads[place[0]], budget, min(self.least, budget), prompt))


@lru_cache(maxsize=4096)
def _scaled(heads: tuple[int, ...], budget: int, least: int, most: int) -> tuple[int, ...]:
    count = len(heads)
    split = allocate_by_counts(heads, budget * count, [least] * count, [most] * count)
    return tuple(split.tokens)


@dataclass(frozen=True)
class OneHead(HeadSplit):
    """One KV head of each layer has the budget, and the others keep everything.

    Args:
        head: which it is.
    """

    head: int = 0

    name: ClassVar = "answer_loss(heads=true)"
    paper: ClassVar = "-"
    fixed: ClassVar = True

    def forecast(
        self, budget: int, prompt: int, kv_heads: int, place: tuple[int, int]
    ) -> list[int]:
        return [budget if head == self.head else UNLIMITED for head in range(kv_heads)]


def with_fixed_heads(policy: Policy, split: HeadSplit, hint: str = _HINT) -> Policy:
    """Return a policy each of whose KV heads has a budget of its own.

    Args:
        hint: what works without one.

    Raises:
        UsageError: a policy that keeps equal counts in all heads, or splits its budget by itself.
    """
    if policy.budget_is_traffic or policy.reader is not None:
        why = "it reads as many tokens in every KV head"
    elif policy.head_split is not None:
        why = "it splits its budget over the KV heads by itself"
    else:
        try:
            return replace(policy, heads=split)
        except UsageError as error:
            why = error.message
    raise UsageError(
        f"the KV heads of policy `{policy}` have no budgets of their own: {why}", hint=hint
    )
