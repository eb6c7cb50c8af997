"""What each layer may keep of a prompt: the only place where a budget meets the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtool.errors import UsageError
from kvtool.policies.allocate.room import Room
from kvtool.policies.policy import Policy


@dataclass(frozen=True)
class Spread:
    """F of each layer (`kvtool.policies.allocate.d2o`), and the prompt's length it was taken on."""

    variance: Sequence[float]
    tokens: int


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
        allocator = self.policy.allocator
        if allocator.metric not in (None, "f_variance"):
            raise UsageError(
                f"`{allocator.modifier}` needs measurements of the model, which a plan holds",
                hint=f"kvtool profile --metrics {allocator.metric} | "
                f"kvtool plan-budget - --allocator {allocator.name}",
            )

    def for_prompt(self, mean: int, n: int, spread: Spread | None = None) -> list[int]:
        if mean >= n:
            return [mean] * self.layers  # the prompt fits; what is generated grows alike
        score = self.policy.score
        room = Room(
            total=mean * self.layers,
            lo=[min(self.policy.least, mean, n)] * self.layers,
            hi=[n] * self.layers,
            window=score.window if score.when == "prompt" else None,
            variance=spread.variance if spread else None,
            variance_tokens=spread.tokens if spread else 0,
        )
        return self.policy.allocator.split(room).tokens
