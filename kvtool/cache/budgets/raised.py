"""Budgets that grow by what is read, so that it stays whole: a question behind a context."""

from __future__ import annotations

from torch import Tensor

from kvtool.cache.storage.head_budgets import HeadBudgets
from kvtool.cache.storage.layer import SlotLayer


class RaisedBudgets:
    """The layers whose budgets have been raised for the running block."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # tokens seen at the end of the last block, by layer

    def add(self, layer: SlotLayer, positions: Tensor | None, q_len: int) -> None:
        """Add the tokens of a block to what a layer may keep, once.

        Args:
            positions: (batch, q_len) of the block, -1 = padding; None: no padding.
        """
        end = layer.seen + q_len
        if self._ends.get(layer.index) == end:
            return  # raised before its forward, for a policy that makes room there
        self._ends[layer.index] = end
        new = [q_len] * layer.batch_size
        if positions is not None:
            new = (positions >= 0).sum(1).tolist()
        layer.set_budget(layer.budget.raised(new, layer.slots.device))
        heads = HeadBudgets.of(layer)
        if heads is not None:
            heads.raise_by(new)
