"""Measure what CaliDrop relies on: queries of neighbouring tokens are alike.

Queries after RoPE, as they enter the dot product, over the prompt and what is generated after it.
Figure 1 is the cosine of queries by their distance. Figure 3b is how often evicted tokens would be
attended to: a query is held, and its cosine with the one of each step decides. Below `theta1` the
evicted part is computed anew and the step's query is held instead. Then, or above `theta2`, the
output is calibrated; in between it is left alone. https://arxiv.org/abs/2507.19906
"""

from __future__ import annotations

from collections.abc import Sequence

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
        prompt, *decoded = self._tail[layer]
        sums = self._sums[layer]
        if decoded:
            tail = torch.cat(self._tail[layer], 1)
            sums = sums + (lag_sums(tail, self._lags) - lag_sums(prompt, self._lags))
        return sums / (self._length[layer] - torch.arange(1, self._lags + 1, device=sums.device))


DEFAULT = (0.7, 0.85)
GRID = [DEFAULT, *((t1, t2) for t1 in (0.6, 0.65, 0.7, 0.75, 0.8) for t2 in (0.8, 0.85, 0.9))]
GRID = [point for point in dict.fromkeys(GRID) if point[0] < point[1]]
_FEW, _PROMPT = 16, 128  # decoded queries that are too few, and prompt queries used instead


def recompute_shares(queries: Tensor, grid: Sequence[tuple[float, float]]) -> Tensor:
    """Replay the automaton.

    Args:
        queries: (..., 1 + steps, dim); the first is held at the beginning.
        grid: pairs of theta1 and theta2.

    Returns:
        (..., grid, 2): shares of the steps that recompute, and that calibrate (those included).
    """
    units = functional.normalize(queries.float(), dim=-1, eps=1e-8)
    cosines = units @ units.transpose(-1, -2)
    theta1 = list(dict.fromkeys(low for low, _ in grid))
    low = torch.tensor(theta1, device=queries.device)
    held = torch.zeros(*units.shape[:-2], len(theta1), dtype=torch.long, device=queries.device)
    steps = units.shape[-2] - 1
    rho = torch.empty(steps, *held.shape, dtype=torch.float32, device=queries.device)
    for step in range(steps):
        rho[step] = cosines[..., step + 1, :].gather(-1, held)
        held = torch.where(rho[step] < low, step + 1, held)
    rho = rho[..., [theta1.index(t1) for t1, _ in grid]]
    pairs = torch.tensor(grid, device=queries.device)
    recomputed = rho < pairs[:, 0]
    calibrated = recomputed | (rho > pairs[:, 1])
    return torch.stack([recomputed.double().mean(0), calibrated.double().mean(0)], -1)


def replays_prompt(steps: int) -> bool:
    """Whether so few tokens are decoded that the last queries of the prompt are replayed, too."""
    return steps < _FEW


class RecomputeFrequency:
    """Shares of steps that recompute and calibrate in every layer, per head and thresholds."""

    def __init__(self, steps: int) -> None:
        """Expect `steps` decoded tokens."""
        self._from_prompt = _PROMPT if replays_prompt(steps) else 1
        self._queries: dict[int, list[Tensor]] = {}

    def see(self, seen: Seen) -> None:
        """Keep the last query of the prompt and those of decoded tokens."""
        last = seen.query[:, -self._from_prompt :].float()
        self._queries.setdefault(seen.layer, []).append(last.clone())

    def results(self) -> dict[str, dict[int, Tensor]]:
        """Return (heads, grid, 2)."""
        shares = {
            layer: recompute_shares(torch.cat(queries, 1), GRID)
            for layer, queries in self._queries.items()
        }
        return {"recompute_frequency": shares}
