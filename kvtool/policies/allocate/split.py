"""Split a budget over the layers: each layer's share of a prompt, decided in one place.

A policy's own allocator splits it, or a plan does.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtool.documents.plan import PlanDocument
from kvtool.errors import UsageError
from kvtool.maths.allocation import allocate_by_counts
from kvtool.policies.allocate.problem import AllocationProblem
from kvtool.policies.allocate.table import spell_allocator
from kvtool.policies.allocate.uniform import Uniform
from kvtool.policies.parts import Allocator
from kvtool.policies.policy import Policy


@dataclass(frozen=True)
class Spread:
    """How the queries of a prompt spread their attention over what each layer held of it.

    Attributes:
        variance: F of each layer (`kvtool.policies.allocate.d2o`).
        queries: tokens of the prompt or turn.
        held: tokens that each layer held, earlier ones included; of a first prompt all of them.
    """

    variance: Sequence[float]
    queries: int
    held: Sequence[int]

    @property
    def largest(self) -> list[float]:
        """Return the largest F of each layer, where all queries attend to the same token."""
        return [self.queries**2 * (held - 1) / held**2 if held else 0.0 for held in self.held]


class Split(Protocol):
    """Budgets of the layers whose budget is free, in order."""

    def for_prompt(self, mean: int, n: int, spread: Spread | None = None) -> list[int]:
        """Return the tokens of each layer for a prompt of `n` tokens.

        Args:
            mean: the budget, in tokens per layer and KV head.
            spread: how the layers' attention is spread, where the allocator wants it.
        """


@dataclass(frozen=True)
class AllocatedSplit:
    """The split of a policy's own allocator.

    Raises:
        UsageError: the allocator needs measurements that only a plan has.
    """

    policy: Policy
    layers: int

    def __post_init__(self) -> None:
        allocator = self.allocator
        if allocator.metric == "curves":
            raise UsageError(
                "published curves are in a file, which a plan is made from",
                hint="kvtool plan-budget --curves FILE.json ..",
            )
        if allocator.metric not in (None, "f_variance"):
            raise UsageError(
                f"`{allocator.modifier}` needs measurements of the model, which a plan holds",
                hint=f"kvtool profile --metrics {allocator.measurement} | "
                f"kvtool plan-budget - --allocator {shlex.quote(spell_allocator(allocator))}",
            )

    @property
    def allocator(self) -> Allocator:
        """Return the policy's allocator, or one that gives all layers the same."""
        return self.policy.allocator or Uniform()

    def for_prompt(self, mean: int, n: int, spread: Spread | None = None) -> list[int]:
        held = [n] * self.layers if spread is None else spread.held
        total = mean * self.layers
        spare = total - sum(held)
        if spare >= 0:  # the prompt fits; what is generated grows alike
            return [tokens + spare // self.layers for tokens in held]
        problem = AllocationProblem(
            total=total,
            min_budgets=[min(self.policy.min_budget, mean, tokens) for tokens in held],
            max_budgets=held,
            window=self.policy.voting_window,
            variance=spread.variance if spread else (),
            largest=spread.largest if spread else (),
        )
        return self.allocator.split(problem).tokens


def tokens_for_prompt(plan: PlanDocument, n: int) -> list[int]:
    """Return the tokens of every layer, per KV head, for a prompt of `n` tokens.

    A plan made from a ratio is scaled to the prompt: its free layers hold floor(ratio * n), at
    least 1, times their number together. Where it was edited, they hold that share of their sum.
    Other plans hold as they are; what a layer cannot hold of a short prompt goes to the others.
    Where the whole prompt fits, every layer has at least all of it, and the rest is for generated
    tokens.

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
