"""Tokens that leave a layer: what is shown to a part that makes something of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtool.policies.heads import KVHeads, all_here
from kvtool.policies.numbers import Count, State

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Eviction:
    """Tokens that leave a layer, and those that stay.

    Attributes:
        keys, values: (batch, kv_heads, slots, dim) of both.
        state: the numbers beside these slots.
        evicted: (batch, kv_heads, evicted) int64, the slots of those that leave.
        evicted_positions: their true positions; -1 where a head loses fewer.
        kept_keys, kept_values: (batch, kv_heads, kept, dim) of those that stay, to be changed in
            place; of one decoded token they are `keys` and `values` themselves.
        kept_state: the numbers beside these.
        kept_positions: their true positions, -1 = empty; ascending, unless one token was decoded.
        tokens_seen: tokens of the row so far.
        layer: index of the layer.
        heads: all KV heads of the layer, of which these may be a part.
        whole: whether every head loses equally many.
        importance: (batch, kv_heads, slots) float32 by which a block was judged; None for a decoded
            token.
    """

    keys: Tensor
    values: Tensor
    state: State
    evicted: Tensor
    evicted_positions: Tensor
    kept_keys: Tensor
    kept_values: Tensor
    kept_state: State
    kept_positions: Tensor
    tokens_seen: Count
    layer: int
    whole: bool = False
    heads: KVHeads = field(default_factory=all_here)
    importance: Tensor | None = None

    @property
    def decoded(self) -> bool:
        """Tell whether one token leaves for one that was decoded: kept slots are in no order."""
        return self.importance is None
