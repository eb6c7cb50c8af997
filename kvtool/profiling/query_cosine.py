"""Measure how much queries change direction from token to token (CaliDrop, figure 1).

Queries after RoPE, as they enter the dot product, over the prompt and what is generated after it.
https://arxiv.org/abs/2507.19906
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.profiling.seen import Seen

DISTANCES = 64


def lag_sums(vectors: Tensor, lags: int) -> Tensor:
    """Return the sums of the dot products of vectors that are 1, 2 .. `lags` apart.

    Blocks of `lags` vectors meet themselves and the block before in one product summed over all
    blocks, whose diagonals are the answer.

    Args:
        vectors: (heads, n, dim).

    Returns:
        (heads, lags).
    """
    heads, n, dim = vectors.shape
    blocks = (
        functional.pad(vectors, (0, 0, 0, -n % lags)).view(heads, -1, lags, dim).transpose(1, 2)
    )
    own = blocks.flatten(2) @ blocks.flatten(2).transpose(1, 2)
    before = blocks[:, :, 1:].flatten(2) @ blocks[:, :, :-1].flatten(2).transpose(1, 2)
    joined = torch.cat(
        [before, own], -1
    )  # (heads, lags, 2 lags); column c is lags - c behind row 0
    row = torch.arange(lags, device=vectors.device)[:, None]
    column = row + lags - torch.arange(1, lags + 1, device=vectors.device)
    return joined.gather(2, column.expand(heads, -1, -1)).sum(1)


class QueryCosine:
    """Mean cosine by distance of every layer's queries, per head."""

    def __init__(self, tokens: int) -> None:
        """Expect `tokens` queries in all."""
        self._lags = max(1, min(DISTANCES, tokens - 1))
        self._sums: dict[int, Tensor] = {}
        self._length: dict[int, int] = {}
        self._tail: dict[int, list[Tensor]] = {}

    def see(self, seen: Seen) -> None:
        """Sum over a prompt, or keep the query of a decoded token."""
        units = functional.normalize(seen.query.float(), dim=-1, eps=1e-8)
        self._length[seen.layer] = self._length.get(seen.layer, 0) + units.shape[1]
        if seen.decoding:
            self._tail[seen.layer].append(units)
        else:
            self._sums[seen.layer] = lag_sums(units, self._lags)
            self._tail[seen.layer] = [units[:, -self._lags :].clone()]

    def results(self) -> dict[str, dict[int, Tensor]]:
        """Return (heads, distances): the mean cosine at distance 1, 2 .."""
        return {"query_cosine": {layer: self._mean(layer) for layer in self._sums}}

    def _mean(self, layer: int) -> Tensor:
        prompt, tail = self._tail[layer][0], torch.cat(self._tail[layer], 1)
        decoded = lag_sums(tail, self._lags) - lag_sums(prompt, self._lags)
        pairs = self._length[layer] - torch.arange(1, self._lags + 1, device=tail.device)
        return (self._sums[layer] + decoded) / pairs
