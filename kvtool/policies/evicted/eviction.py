"""Evicted tokens of a layer, as they are shown to the part that keeps something of them.

`Merging` is the role of parts that merge evicted tokens into kept ones. Another part keeps evicted
tokens stored and lets the reader look at the others until the next prompt. RocketKV-MT (Behnam et
al., 2025, https://arxiv.org/abs/2502.14051, section 3.5) drops nothing between turns, and each turn
chooses anew, among all tokens so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from kvtool.lazy_torch import Tensor, torch
from kvtool.policies.evidence import PromptQueries
from kvtool.policies.numbers import Count, HeadSizes, KVHeads, State, all_here
from kvtool.policies.parts import Evicted


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
        tokens_seen: tokens of the sequence so far.
        layer: index of the layer.
        heads: all KV heads of the layer; these may be a part of them.
        whole: whether every head loses equally many.
        importance: (batch, kv_heads, slots) float32 by which a block was judged; None for a decoded
            token.
        queries: those that a `Merging` asks for by its `queries`; None: it asks for none.
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
    queries: PromptQueries | None = None

    @property
    def decoded(self) -> bool:
        """Return whether one token leaves for one that was decoded: kept slots are in no order."""
        return self.importance is None


class Merging(Evicted):
    """Goes into the tokens that stay.

    Attributes:
        queries: how many queries of a prompt it is shown when the prompt is cut, the last ones; it
            then changes kept tokens at that cut and never again. 0: it is shown none.
    """

    queries: int = 0

    def held_bytes(self, layer: HeadSizes, evicts: bool) -> int:
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


@dataclass(frozen=True)
class SelectOnly(Evicted):
    """Keep evicted tokens stored, out of the reader's sight, until the next prompt."""

    name: ClassVar = "select-only"
    paper: ClassVar = "https://arxiv.org/abs/2502.14051"

    def held_bytes(self, layer: HeadSizes, evicts: bool) -> int:
        return 0  # they lie in slots
