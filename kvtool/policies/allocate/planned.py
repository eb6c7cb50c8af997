"""A plan for one prompt: tokens of every layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtool.documents.plan import PlanDocument
from kvtool.maths.allocation import allocate
from kvtool.policies.allocate.split import Spread
from kvtool.sizes import fraction_of


def tokens_for_prompt(plan: PlanDocument, n: int) -> list[int]:
    """Return the tokens of every layer, per KV head, for a prompt of `n` tokens.

    A plan made from a ratio is scaled to the prompt: its free layers hold floor(ratio * n), at
    least 1, times their number together. Other plans hold as they are; what a layer cannot hold of
    a short prompt goes to the others. Where the whole prompt fits, no layer has less than all of
    it, and what is left is room for generated tokens.

    Layers with a sliding window have what the plan says of them, layers without attention 0.
    """
    free = plan.free_layers
    total = _total(plan, n)
    if total >= n * len(free):
        least, most = n, total
    else:
        least, most = min(plan.layers.min_tokens, n, total // len(free)), n
    split = allocate(
        [math.log(plan.layers.tokens[i]) for i in free],
        total,
        [least] * len(free),
        [most] * len(free),
    )
    tokens = list(plan.layers.tokens)
    for i, share in zip(free, split.tokens, strict=True):
        tokens[i] = share
    return tokens


def _total(plan: PlanDocument, n: int) -> int:
    """Return what the free layers hold together."""
    budget = plan.target.budget
    if budget.bytes is not None:
        return sum(plan.layers.tokens[i] for i in plan.free_layers)
    mean = budget.tokens if budget.ratio is None else fraction_of(budget.ratio, n)
    return mean * len(plan.free_layers)


@dataclass(frozen=True)
class PlannedSplit:
    """The split of a plan, which knows the layers beforehand."""

    plan: PlanDocument

    def for_prompt(self, mean: int, n: int, spread: Spread | None = None) -> list[int]:
        tokens = tokens_for_prompt(self.plan, n)
        return [tokens[i] for i in self.plan.free_layers]
