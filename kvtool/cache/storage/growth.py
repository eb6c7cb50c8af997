"""How many tokens a layer may keep, and how its buffers grow to that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvtool.cache.storage.meter import ByteMeter
from kvtool.planning.growth import STEP, grown


@dataclass(frozen=True)
class LayerBudget:
    """Tokens that each batch entry of a layer may keep.

    Attributes:
        tokens: one number, or int64 (batch, 1, 1); 0 where nothing is ever evicted.
        min_budget, max_budget: the smallest and the largest of them, known to the host.
        whole: whether the running block has been added to it, and nothing is cut at its end.
    """

    tokens: int | Tensor = 0
    min_budget: int = 0
    max_budget: int = 0
    whole: bool = False

    @classmethod
    def of(cls, entries: list[int], device: torch.device | None = None) -> LayerBudget:
        """Make the budget of batch entries that may keep so many tokens each."""
        low, high = min(entries), max(entries)
        if low == high:
            return cls(high, low, high)
        return cls(torch.tensor(entries, device=device)[:, None, None], low, high)

    def raised(self, new: list[int], device: torch.device) -> LayerBudget:
        """Return the budget with so many tokens more for each batch entry."""
        more = new[0] if len(set(new)) == 1 else torch.tensor(new, device=device)[:, None, None]
        low, high = self.min_budget + min(new), self.max_budget + max(new)
        return LayerBudget(self.tokens + more, low, high, whole=True)


@dataclass(frozen=True)
class Growth:
    """The capacity that buffers take.

    Attributes:
        when: when slots are cut to the budget: after every token, at a prompt's end, or never.
        max_budget: the largest budget of a batch entry.
        expected: slots in use once all expected tokens have been decoded; buffers grow up to these
            first.
        exact: whether buffers are never larger than what is asked for.
        spare: slots above the budget, for tokens that come before some are cut.
    """

    when: Literal["always", "prompt", "never"]
    max_budget: int = 0
    expected: int = 0
    exact: bool = False
    spare: int = 0

    @property
    def limit(self) -> int:
        """Slots of a budget that is always held, with those of tokens that come before a cut."""
        return self.max_budget + self.spare

    def capacity(self, slots: int, before: int) -> int:
        """Return the slots to allocate where so many are asked for and so many are there."""
        capacity = grown(before, slots)
        expected = self.expected
        if self.exact:
            capacity = slots
        elif self.when == "always":
            capacity = max(self.limit, slots) if capacity >= self.max_budget else capacity
            expected = min(expected, self.limit)
        elif self.when == "prompt" and slots <= self.max_budget:
            capacity = min(capacity, self.max_budget)
        if slots <= expected and capacity + STEP >= expected:
            capacity = expected
        return max(capacity, slots)  # heads of different counts, side by side, may exceed the mean


@dataclass(frozen=True)
class Sizing:
    """How the buffers of a layer are sized, and what counts their bytes.

    Attributes:
        growth: the capacity that they take.
        meter: counts the bytes of all layers.
    """

    growth: Growth
    meter: ByteMeter
