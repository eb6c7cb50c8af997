"""A joint budget, for which the KV heads of all layers compete by their scores (KVzip).

Kim et al., 2025, https://arxiv.org/abs/2505.23416, section 3.3: scores of all layers and heads are
on one scale, so the best of them stay wherever they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import ClassVar, Literal

from kvtool.lazy_torch import Tensor, torch
from kvtool.policies.allocate.ada import competing_tokens, total_tokens
from kvtool.policies.allocate.head_split import HeadSplit
from kvtool.policies.allocate.problem import Heads


@dataclass(frozen=True)
class Joint(HeadSplit):
    """Let heads compete for a budget with nothing sure, within their layer or with all others.

    Args:
        layers: `joint`, all layers have one budget together; `each`, every layer has its own.
    """

    layers: Literal["joint", "each"] = "joint"

    name: ClassVar = "joint"
    paper: ClassVar = "https://arxiv.org/abs/2505.23416"
    by_score: ClassVar = True

    @property
    def across_layers(self) -> bool:
        return self.layers == "joint"

    def tokens(self, heads: Heads) -> Tensor:
        return competing_tokens(heads, total_tokens(heads), floor=0, safeguard="force")

    def tokens_of(self, layers: Sequence[Heads]) -> list[Tensor]:
        if not self.across_layers:
            return super().tokens_of(layers)
        first, device = layers[0], layers[0].importance.device
        joined = replace(
            first,
            importance=torch.cat([each.importance.to(device) for each in layers], 1),
            positions=torch.cat([each.positions.to(device) for each in layers], 1),
            protected=torch.cat([_protected(each).to(device) for each in layers], 1),
        )
        total = reduce(torch.add, [total_tokens(each).to(device) for each in layers])
        counts = competing_tokens(joined, total, floor=0, safeguard="force")
        sizes = [each.importance.shape[1] for each in layers]
        own = zip(counts.split(sizes, 1), layers, strict=True)
        return [count.to(each.importance.device) for count, each in own]


def _protected(heads: Heads) -> Tensor:
    if heads.protected is None:
        return torch.zeros_like(heads.positions, dtype=torch.bool)
    return heads.protected
