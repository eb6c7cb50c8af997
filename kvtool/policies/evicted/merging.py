"""The role of evicted tokens that go into those that stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.policies.evicted.eviction import Eviction
from kvtool.policies.heads import HeadSizes
from kvtool.policies.numbers import State
from kvtool.policies.parts import Evicted

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Merging(Evicted):
    """Goes into the tokens that stay."""

    def held_bytes(self, layer: HeadSizes, evicts: bool) -> int:
        import torch

        memory = self.start(1, layer.kv_heads, torch.device("meta"))
        return sum(tensor.numel() * tensor.element_size() for tensor in memory.values())

    def start(self, batch: int, kv_heads: int, device: torch.device) -> State:
        """Make what a layer remembers beside its slots: tensors whose first axis is the batch."""
        return {}

    def absorb(self, memory: State, eviction: Eviction) -> Tensor:
        """Change those that stay by those that leave, and the memory, in place.

        Returns:
            bool (batch, kv_heads, evicted), which of those that leave went into others.
        """
        raise NotImplementedError
