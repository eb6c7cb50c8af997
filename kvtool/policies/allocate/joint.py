"""A joint budget, for which the KV heads of all layers compete by their scores (KVzip).

Kim et al., 2025, https://arxiv.org/abs/2505.23416, section 3.3: scores of all layers and heads are
on one scale, so the best of them stay wherever they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvtool.lazy_torch import Tensor, torch
from kvtool.maths.selection import order_key
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
        """Count the tokens of each head of all layers; a device sync for each batch entry.

        Of what each head holds only the numbers that compete are laid side by side, as some heads
        may hold nearly all of a text and others little.
        """
        if not self.across_layers:
            return super().tokens_of(layers)
        found = [_Layer.of(heads) for heads in layers]
        counts = [each.stored.clone() for each in found]
        sizes, device = [each.stored.shape[1] for each in found], counts[0].device
        heads, starts = sum(sizes), torch.tensor([0, *sizes[:-1]]).cumsum(0).tolist()
        pairs = list(zip(found, starts, strict=True))
        for row in range(len(counts[0])):
            stored = sum(int(each.stored[row].sum()) for each in found)
            spare = sum(each.total[row] for each in found) - stored
            if spare >= 0:
                for count in counts:
                    count[row] += spare // heads
                continue
            keys = torch.cat([each.keys(row, start, heads).to(device) for each, start in pairs])
            most = torch.cat([each.heads_of(row, start).to(device) for each, start in pairs])
            evicted = most[keys.topk(min(-spare, len(keys)), largest=False).indices]
            gone = torch.bincount(evicted, minlength=heads).split(sizes)
            for count, less in zip(counts, gone, strict=True):
                count[row] -= less.to(count.device)
        return counts


@dataclass(frozen=True)
class _Layer:
    """What competes in a layer.

    Attributes:
        total: tokens that its heads may keep together, of each batch entry.
        stored: (batch, kv_heads) tokens that are stored.
        scores, positions, heads: of each batch entry, those that are not protected.
    """

    total: list[int]
    stored: Tensor
    scores: list[Tensor]
    positions: list[Tensor]
    heads: list[Tensor]

    @classmethod
    def of(cls, heads: Heads) -> _Layer:
        there = heads.positions >= 0
        free = there if heads.protected is None else there & ~heads.protected
        own = torch.arange(there.shape[1], device=there.device)[:, None].expand_as(there[0])
        rows = list(zip(heads.importance, heads.positions, free, strict=True))
        return cls(
            total_tokens(heads)[:, 0].tolist(),
            there.sum(-1),
            [importance[among] for importance, _, among in rows],
            [positions[among] for _, positions, among in rows],
            [own[among] for *_, among in rows],
        )

    def heads_of(self, row: int, start: int) -> Tensor:
        """Return the head of each, among those of all layers."""
        return self.heads[row] + start

    def keys(self, row: int, start: int, heads: int) -> Tensor:
        """Return what sorts by score, then by lower position, layer and head."""
        places = self.positions[row].long() * heads + self.heads_of(row, start)
        return order_key(self.scores[row], places)
