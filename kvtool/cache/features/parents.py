"""The layers above one that keeps only tokens that they keep (PyramidInfer)."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.memory import LayerBudget
from kvtool.cache.slots.part import LayerSite, Part
from kvtool.policies.parts import SlotView


class Parent(Protocol):
    """A layer above, as far as those below look at it."""

    budget: LayerBudget

    def stored_positions(self) -> Tensor: ...


class Parents(Part):
    """The first layer of free budget and the one right above; none above the first."""

    name = "parents"
    joins_padded = False

    def __init__(self, first: Parent | None = None, above: Parent | None = None) -> None:
        self.first, self.above = first, above

    @classmethod
    def make(cls, site: LayerSite) -> Parents | None:
        if site.policy.score.layer_tokens != "nested":
            return None
        return cls(site.above[0], site.above[-1]) if site.above else cls()

    def show(self, layer: SlotLayer, view: SlotView) -> SlotView:
        if self.first is None:
            return view
        kept = self.kept(view.positions, layer.seen)
        return replace(view, kept_in_parent=kept, first_layer_budget=self.first.budget.tokens)

    def kept(self, positions: Tensor, seen: int) -> Tensor | None:
        """Which of these slots hold tokens that the layer above keeps: bool (batch, 1, slots).

        Args:
            positions: (batch, kv_heads, slots).
            seen: tokens seen, padding included.
        """
        if self.above is None:
            return None
        kept = self.above.stored_positions()[:, 0].long().to(positions.device)
        count = seen + 1  # an empty slot, -1, counts as the last one
        known = torch.zeros(kept.shape[0], count, dtype=torch.bool, device=positions.device)
        known.scatter_(1, kept.remainder(count), True)[:, -1] = False
        return known.gather(1, positions[:, 0].long().remainder(count))[:, None]
