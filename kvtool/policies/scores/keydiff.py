"""KeyDiff: keys far from the mean direction of all keys stay; no attention is looked at.

Park et al., 2025, https://arxiv.org/abs/2504.15364. The anchor is the mean of the stored keys, each
brought to length 1; a slot's score is minus the cosine of its key and the anchor.

In a prompt run in blocks the anchor is that of the slots present at each cut, as in the paper. With
`positions=cache`, and in models that store latents, keys are taken as they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvtool.lazy_torch import Tensor, torch
from kvtool.policies.parts import AttentionRows, Evidence, Positions, SlotView, State
from kvtool.policies.scores.shared import KeepsEnds

_EPSILON = 1e-12


def distances_from_anchors(keys: Sequence[Tensor], stored: Tensor | None) -> Tensor:
    """Compute minus the cosine between each key and the mean of the unit keys of its layer.

    The unit keys are never written down: a sum of them, and a dot product with one, are those of
    the keys weighted by their inverse lengths.

    Args:
        keys: (batch, kv_heads, slots, key_dim) of each layer, stacked along the batch.
        stored: bool (batch, kv_heads, slots), the slots that are not empty; None: all.

    Returns:
        (batch, kv_heads, slots) float32, in [-1, 1].
    """
    inverse = torch.cat([torch.linalg.vector_norm(each.float(), dim=-1) for each in keys])
    inverse = inverse.clamp_(min=_EPSILON).reciprocal_()
    weights = inverse if stored is None else inverse * stored
    rows = weights[:, :, None].chunk(len(keys))
    sums = [row @ each.float() for row, each in zip(rows, keys, strict=True)]
    anchors = torch.nn.functional.normalize(torch.cat(sums), dim=-1)
    columns = anchors.transpose(-1, -2).neg().chunk(len(keys))
    dots = [each.float() @ column for each, column in zip(keys, columns, strict=True)]
    return torch.cat(dots)[..., 0] * weights


@dataclass(frozen=True)
class KeyDiff(KeepsEnds):
    """Keep the tokens whose keys point away from the mean direction of all keys."""

    positions: Positions = "text"

    name: ClassVar = "keydiff"
    paper: ClassVar = "https://arxiv.org/abs/2504.15364"
    evidence: ClassVar = Evidence.KEYS

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        return distances_from_anchors(view.keys, view.stored)
