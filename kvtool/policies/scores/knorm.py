"""Knorm: keys of small length stay; no attention is looked at.

Devoto et al., 2024, https://arxiv.org/abs/2406.11430, section 4: tokens whose keys have a small L2
norm get much attention. A slot's score is minus the length of its key.

Differences from the paper: it spares the first two layers, here every layer is cut (a plan may give
each layer its own budget).

RoPE changes no length. So in the first layer, where a key depends on its token alone, a token that
occurs twice has two keys of one length. Lengths are rounded to 19 bits, so that such keys tie, and
the lower position stays, whatever the rounding of a product was. Where a model normalises its keys
(Qwen3, Gemma 3), only the weights of that norm make lengths differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvtool.lazy_torch import Tensor, torch
from kvtool.policies.parts import AttentionRows, Evidence, SlotView, State
from kvtool.policies.scores.shared import KeepsEnds

_DROPPED = 16  # the lowest 4 bits of a float32


def key_lengths(keys: Sequence[Tensor]) -> Tensor:
    """Compute the lengths of the keys of several layers, stacked along the batch.

    They are summed in float64, for the order of a float32 sum is that of the memory.

    Args:
        keys: (batch, kv_heads, slots, key_dim) of each layer.

    Returns:
        (batch, kv_heads, slots) float32, each of 19 bits behind its first.
    """
    lengths = [torch.linalg.vector_norm(each, dim=-1, dtype=torch.float64) for each in keys]
    bits = torch.cat(lengths).float().view(torch.int32)
    return bits.add_(_DROPPED // 2).bitwise_and_(-_DROPPED).view(torch.float32)


@dataclass(frozen=True)
class Knorm(KeepsEnds):
    """Keep the tokens whose keys are shortest."""

    name: ClassVar = "knorm"
    paper: ClassVar = "https://arxiv.org/abs/2406.11430"
    evidence: ClassVar = Evidence.KEYS

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        return key_lengths(view.keys).neg_()
