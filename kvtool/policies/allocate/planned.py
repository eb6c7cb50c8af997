"""A plan for one prompt: tokens of every layer."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.documents.plan import PlanDocument
from kvtool.maths.allocation import allocate_by_counts
from kvtool.policies.allocate.split import Spread


def tokens_for_prompt(plan: PlanDocument, n: int) -> list[int]:
    """Return the tokens of every layer, per KV head, for a prompt of `n` tokens.

    A plan made from a ratio is scaled to the prompt: its free layers hold floor(ratio * n), at
    least 1, times their number together; where it was edited, that share of their sum. Other plans
    hold as they are; what a layer cannot hold of a short prompt goes to the others. Where the whole
    prompt fits, every layer has at least all of it, and the rest is for generated tokens.

    Layers with a sliding window have what the plan says of them, layers without attention 0.
    """
    tokens, free = list(plan.layers.tokens), plan.free_layers
    total = _total(plan, n)
    given = [tokens[i] for i in free]
    if total == sum(given) and (max(given) <= n or min(given) >= n):
        return tokens
    if total >= n * len(free):
        least, most = n, total
    else:
        least, most = min(plan.layers.min_tokens, n, total // len(free)), n
    split = allocate_by_counts(given, total, [least] * len(free), [most] * len(free))
    for i, share in zip(free, split.tokens, strict=True):
        tokens[i] = share
    return tokens


def _total(plan: PlanDocument, n: int) -> int:
    """Return what the free layers hold together."""
    target, budget, free = plan.target, plan.target.budget, plan.free_layers
    planned = sum(plan.layers.tokens[i] for i in free)
    if budget.ratio is not None and plan.edited:
        return max(len(free), planned * n // target.prompt_tokens)
    if budget.bytes is not None or plan.edited:
        return planned
    return budget.for_prompt(n) * len(free)


@dataclass(frozen=True)
class PlannedSplit:
    """The split of a plan, which knows the layers beforehand."""

    plan: PlanDocument

    def for_prompt(self, mean: int, n: int, spread: Spread | None = None) -> list[int]:
        tokens = tokens_for_prompt(self.plan, n)
        return [tokens[i] for i in self.plan.free_layers]
