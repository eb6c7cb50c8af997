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

        Only what competes is laid side by side, as some heads may hold nearly all of a text.
        """
        if not self.across_layers:
            return super().tokens_of(layers)
        found = [_competing(heads) for heads in layers]
        counts = [stored for _, stored, _ in found]
        sizes = [each.shape[1] for each in counts]
        heads, device = sum(sizes), counts[0].device
        for row in range(len(counts[0])):
            spare = sum(int(total[row]) - int(stored[row].sum()) for total, stored, _ in found)
            if spare >= 0:
                for count in counts:
                    count[row] += spare // heads
                continue
            parts = zip(*(each[row] for *_, each in found), strict=True)
            scores, places, free = (torch.cat([one.to(device) for one in own]) for own in parts)
            owners = torch.arange(heads, dtype=torch.int32, device=device)
            owners = owners.repeat_interleave(free, output_size=len(scores))
            keys = order_key(scores, places.mul_(heads).add_(owners))
            del scores, places
            evicted = owners[keys.topk(min(-spare, len(keys)), largest=False).indices]
            gone = torch.bincount(evicted, minlength=heads).split(sizes)
            for count, less in zip(counts, gone, strict=True):
                count[row] -= less.to(count.device)
        return counts


def _competing(heads: Heads) -> tuple[Tensor, Tensor, list[tuple[Tensor, ...]]]:
    """Return what a layer may keep, what its heads store, and what competes in each entry.

    Returns:
        (batch,) tokens; (batch, kv_heads) tokens; and score and position of each slot that is not
        protected, head by head, and (kv_heads,) how many there are of each head.
    """
    there = heads.positions >= 0
    free = there if heads.protected is None else there & ~heads.protected
    rows = zip(heads.importance, heads.positions, free, strict=True)
    competing: list[tuple[Tensor, ...]] = [
        (scores[among], places[among], among.sum(-1)) for scores, places, among in rows
    ]
    return total_tokens(heads)[:, 0], there.sum(-1), competing
