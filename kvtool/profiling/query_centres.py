"""The centre of each head's queries before RoPE, for TriAttention.

Queries of prompts, rotated back to before RoPE. Their mean is the centre. Beside it are the mean
lengths of their pairs, and how the layer rotates. https://arxiv.org/abs/2604.04921. The number of a
layer is the length of the centre over the mean length, summed over pairs: 1 where all queries of a
head are the same, near 0 where they point anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvtool.cache.tensor_files.heads import CENTRES, FREQUENCIES, LAYOUT, LENGTHS, rotation_numbers
from kvtool.maths.pairs import pair_lengths
from kvtool.maths.rotation import Rotation
from kvtool.profiling.seen import Seen

_ROWS = 1024  # queries that are rotated at a time


class QueryCentres:
    """Means of the queries of every layer without a sliding window."""

    def __init__(self, rotations: Mapping[int, Rotation | None]) -> None:
        """Take how each attention layer rotates its queries."""
        self._rotations = rotations
        self._found: dict[str, dict[int, Tensor]] = {
            name: {} for name in (CENTRES, LENGTHS, FREQUENCIES, LAYOUT)
        }

    def see(self, seen: Seen) -> None:
        """Average over the queries of a prompt."""
        if seen.decoding or seen.slides:
            return
        layer, query, rotation = seen.layer, seen.query, self._rotations[seen.layer]
        tokens = query.shape[1]
        first = seen.step.layer.seen - tokens
        centres, lengths = list[Tensor](), list[Tensor]()
        for start in range(0, tokens, _ROWS):
            part = query[None, :, start : start + _ROWS].float()
            if rotation is None:
                own = pair_lengths(part)
            else:
                places = first + start + torch.arange(part.shape[2], device=part.device)
                part = rotation.shift(part, -places.float()[None, None])
                own = rotation.lengths(part)
            centres.append(part[0].double().sum(1))
            lengths.append(own[0].double().sum(1))
        self._found[CENTRES][layer] = torch.stack(centres).sum(0) / tokens
        self._found[LENGTHS][layer] = torch.stack(lengths).sum(0) / tokens
        numbers = rotation_numbers(rotation, query.shape[-1])
        self._found[FREQUENCIES][layer], self._found[LAYOUT][layer] = numbers

    def results(self) -> dict[str, dict[int, Tensor]]:
        """Return (heads, ..) by name."""
        return self._found


def concentration(found: Mapping[str, Tensor]) -> Tensor:
    """Return the length of each head's centre over the mean length: (layers, heads)."""
    centres, lengths = found[CENTRES], found[LENGTHS]
    if centres.dim() < 3:  # no layer has any
        return centres
    shares = centres.new_full(centres.shape[:2], float("nan"))
    for layer, (rotated, interleaved) in enumerate(found[LAYOUT][:, 0].tolist()):
        if rotated == rotated:
            own = pair_lengths(centres[layer], round(rotated), interleaved=interleaved > 0.5)
            shares[layer] = own.double().sum(-1) / lengths[layer].sum(-1).clamp(min=1e-12)
    return shares
