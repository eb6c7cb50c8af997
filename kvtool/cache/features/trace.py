"""Trace of each token of a layer, for `cache.show`: its rank at the last cut, merged, read.

One byte a token and KV head, in host memory; only kept where `KVCache.record` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import Part

TOP = 255
"""The rank of what stays whatever its score is."""


class Trace(Part):
    """What happened to the tokens of one layer, by their position in the text.

    Attributes:
        ranks: (batch, kv_heads, tokens) uint8, the rank of each token's importance when it was last
            judged. 1 is for the lowest of a head, 255 for the highest and for protected tokens; 0
            before.
        merged: bool of the same shape, what was evicted into tokens that stay.
        reads: uint8 of the same shape, bit i of it: whether the last decoded token but i read it.
        steps: decoded tokens that a reader has chosen for.
    """

    name = "trace"

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        nothing = torch.zeros(0, 0, 0, dtype=torch.uint8)
        self.ranks, self.merged, self.reads = nothing, nothing.bool(), nothing
        self.steps = 0

    def begin(self, batch: int, kv_heads: int, device: torch.device) -> None:
        self.clear()
        self.ranks, self.merged, self.reads = (
            each.new_zeros(batch, kv_heads, 0) for each in (self.ranks, self.merged, self.reads)
        )

    def allows_static(self, layer: SlotLayer) -> bool:
        return layer.policy.on_evict is None  # what is evicted is noted on the host

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        self.ranks, self.merged, self.reads = map(change, (self.ranks, self.merged, self.reads))

    def note_scores(self, importance: Tensor, positions: Tensor, protected: Tensor | None) -> None:
        ranks = rank_bytes(importance, positions, protected)
        self.ranks = _put(self.ranks, positions, ranks)

    def note_merged(self, positions: Tensor, merged: Tensor) -> None:
        """Note which evicted tokens, (batch, kv_heads, evicted), have gone into those that stay."""
        self.merged = _put(self.merged, positions, merged)

    def note_reads(self, positions: list[Tensor]) -> None:
        """Note what a token has read of each entry, (entries, kv_heads, read), -1 = none."""
        width = max((int(each.max()) + 1 for each in positions if each.numel()), default=0)
        parts = []
        for each in positions:
            now = torch.zeros(*each.shape[:2], max(width, self.reads.shape[2]), dtype=torch.uint8)
            parts.append(_put(now, each, torch.ones_like(each, dtype=torch.uint8)))
        now = torch.cat(parts)
        before = functional.pad(self.reads, (0, now.shape[2] - self.reads.shape[2]))
        self.reads = (before << 1) | now
        self.steps += 1


def rank_bytes(importance: Tensor, positions: Tensor, protected: Tensor | None) -> Tensor:
    """Rank the tokens of each head: 1 for the least important, 255 for the most, 0 for none."""
    stored = positions >= 0
    key = importance.float()
    if protected is not None:
        key = key.masked_fill(protected, float("inf"))
    order = key.masked_fill(~stored, float("inf")).argsort(stable=True, dim=-1)
    place = torch.empty_like(order)
    place.scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
    last = (stored.sum(-1, keepdim=True) - 1).clamp(min=1)
    ranks = (1 + place * (TOP - 1) // last).clamp(max=TOP)
    if protected is not None:
        ranks = ranks.masked_fill(protected, TOP)
    return ranks.masked_fill(~stored, 0).to(torch.uint8)


def _put(table: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    """Write values by position into a table, made as wide as they need; -1 goes nowhere."""
    positions, values = positions.long().cpu(), values.to("cpu", table.dtype)
    if not positions.numel():
        return table
    width = max(table.shape[2], int(positions.max()) + 1)
    wide = functional.pad(table, (0, width + 1 - table.shape[2]))
    return wide.scatter(2, positions.remainder(width + 1), values)[..., :width]
