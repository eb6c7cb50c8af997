"""Turn a budget of pairs that a decoded token may read into the sizes of a reader.

The sizes depend on the lengths of the prompts. This file also reads the key bases that `kvtool
profile --metrics key_basis` writes beside a profile, for readers that need them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.tensor_files.heads import read_heads
from kvtool.documents.plan import PlanDocument
from kvtool.errors import UsageError
from kvtool.planning.rocketkv_stages import PlannedStages, planned_stages, sized_reader, tokens_left
from kvtool.policies.allocate.split import PlannedSplit
from kvtool.policies.parts import Read
from kvtool.policies.policy import Policy
from kvtool.sizes import Budget, fraction_of

NAME = "key_basis"


def read_basis(path: str) -> Tensor:
    """Read the bases of all layers (UsageError: no such file, or one that was changed).

    Returns:
        (layers, kv_heads, head_dim, head_dim), a direction a column, NaN for layers without one.
    """
    return read_heads(path, (NAME,), policy="loki", what="key bases")[NAME]


@dataclass
class TrafficBudgets:
    """The sizes of readers, fixed for each sequence when its prompt ends.

    Attributes:
        budget: pairs of key and value that a step reads of every layer and KV head, or a share of
            the prompt, or bytes of all layers and sequences. None: the reader has its own `k`.
        plan: has RocketKV's stages, and the pairs of every layer for other readers.
        tokens: a budget of tokens or bytes as pairs of a layer, for a prompt so long.
        reserved: how many tokens will be generated, as far as is known.
        layers: those whose budget is free.
        ends: tokens that each sequence had seen when its prompt ended; one number if all are alike.
    """

    policy: Policy
    budget: Budget | None
    plan: PlanDocument | None
    tokens: Callable[[SlotLayer, int], int]
    reserved: Callable[[], int]
    layers: list[SlotLayer]
    ends: list[int] = field(default_factory=list)
    _bases: Tensor | None = None
    _stages: dict[int, PlannedStages | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reader_part.basis is not None:
            self._bases = read_basis(self.reader_part.basis)

    @property
    def reader_part(self) -> Read:
        """The reader as the policy has it."""
        assert self.policy.reader is not None, "these are budgets of readers"
        return self.policy.reader

    def end(self, row: int) -> int:
        """Tokens that a sequence had seen when its prompt ended."""
        return self.ends[0] if len(self.ends) == 1 else self.ends[row]

    def end_prompt(self, lengths: list[int]) -> None:
        """Note the lengths of the sequences' prompts."""
        self.ends = lengths if len(set(lengths)) > 1 else lengths[:1]

    def load(self, ends: list[int]) -> None:
        """Take the lengths of prompts from a file."""
        self.ends = ends

    def clear(self) -> None:
        """Forget the text."""
        self.ends = []

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        """Let what is known of each batch entry follow the entries."""
        if len(self.ends) > 1:
            self.ends = change(torch.tensor(self.ends)).tolist()

    def pairs(self, layer: SlotLayer, length: int) -> int:
        """What a step may read of a sequence, its prompt being so long.

        A sequence of padding alone has at least what its reader needs.
        """
        return max(self._pairs(layer, length), 0 if length else self.policy.min_budget)

    def _pairs(self, layer: SlotLayer, length: int) -> int:
        own = self.reader_part.k
        if own is not None and not self.policy.budget_is_traffic:
            return own * self.reader_part.divisor
        stages = self.stages(length)
        if stages is not None:
            return stages.pairs[self.layers.index(layer)]
        if self.plan is not None:
            return PlannedSplit(self.plan).for_prompt(0, length)[self.layers.index(layer)]
        if self.budget is not None and self.budget.ratio is not None:
            return fraction_of(self.budget.ratio, length)
        return self.tokens(layer, length)

    def stages(self, length: int) -> PlannedStages | None:
        """What a plan says of RocketKV's stages; None: no plan, or a reader without them."""
        if self.plan is None:
            return None
        if length not in self._stages:
            self._stages[length] = planned_stages(self.plan, self.policy, length)
        return self._stages[length]

    def stored(self, layer: SlotLayer, length: int) -> int:
        """What stage 1 of RocketKV leaves of a prompt (UsageError: too small a budget)."""
        stages = self.stages(length)
        if stages is not None:
            return min(length, stages.kept[self.layers.index(layer)])
        return tokens_left(self.policy, self.pairs(layer, length), length, self.reserved())

    def reader(self, layer: SlotLayer, row: int, stored: int) -> tuple[Read, int]:
        """The reader of a sequence that held `stored` tokens, and the pairs it may read."""
        length = self.end(row) if self.policy.budget_is_traffic else stored
        pairs, head_dim = self.pairs(layer, length), layer.slots.keys.shape[-1]
        stages = self.stages(length)
        planned = None if stages is None else stages.of_layer(self.layers.index(layer))
        reader = sized_reader(
            self.policy, pairs, length, stored, head_dim, self.reserved(), planned
        )
        return reader, pairs

    def basis(self, layer: SlotLayer) -> Tensor | None:
        """The key basis of a layer, (kv_heads, head_dim, head_dim) (UsageError: none of it)."""
        if self._bases is None:
            return None
        dim = layer.slots.keys.shape[-1]
        shape = (layer.slots.kv_heads, dim, dim)
        fits = layer.index < len(self._bases) and self._bases.shape[1:] == shape
        if not fits or not self._bases[layer.index].isfinite().all():
            raise UsageError(
                f"`{self.reader_part.basis}` holds no key basis for layer {layer.index} "
                f"with {shape[0]} KV heads of {shape[1]} channels"
            )
        return self._bases[layer.index].to(layer.slots.device)
