"""Find when the attention that a token gets stops changing (RoCo, figure 3).

std_k of a token is the population standard deviation of the attention that it gets in its first k
steps, its own step included. RoCo calls scores robust where std_k peaks early and then falls. The
paper counts tokens whose peak is within 50 steps; we count among the tokens that were seen for
longer than that. https://arxiv.org/abs/2402.06262
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.profiling.seen import Seen

EARLY = 50


class Persistence:
    """Running standard deviations of the attention of every token of a layer.

    Rows of weights come a few at a time; numbers are float64, as a variance is a difference.
    """

    def __init__(self, heads: int, tokens: int, device: torch.device | str = "cpu") -> None:
        """Expect `tokens` rows in all."""
        empty = torch.zeros(heads, tokens, dtype=torch.float64, device=device)
        self._sum, self._square = empty.clone(), empty.clone()
        self._highest = empty - 1
        self.peak = torch.zeros(heads, tokens, dtype=torch.long, device=device)
        self._curve = empty.clone()
        self._seen = 0

    def add(self, weights: Tensor) -> None:
        """Take in further rows.

        Args:
            weights: (heads, rows, keys), the last key being that of the last row.
        """
        heads, rows, keys = weights.shape
        weights = weights.double()
        token = torch.arange(keys, device=weights.device)
        steps = torch.arange(self._seen + 1, self._seen + rows + 1, device=weights.device)[:, None]
        steps = steps - token  # how many rows the token has had, (rows, keys)
        sums = weights.cumsum(1) + self._sum[:, None, :keys]
        squares = weights.square().cumsum(1) + self._square[:, None, :keys]
        count = steps.clamp(min=1)
        std = (squares / count - (sums / count).square()).clamp(min=0).sqrt()
        std = torch.where(steps > 0, std, -1.0)
        self._sum[:, :keys], self._square[:, :keys] = sums[:, -1], squares[:, -1]
        highest, row = std.max(1)
        better = highest > self._highest[:, :keys]
        at = self._seen + 1 + row - token
        self.peak[:, :keys] = torch.where(better, at, self.peak[:, :keys])
        self._highest[:, :keys] = torch.maximum(highest, self._highest[:, :keys])
        place = (count - 1).expand(heads, -1, -1).flatten(1)
        self._curve.scatter_add_(1, place, std.clamp(min=0).flatten(1))
        self._seen += rows

    def curve(self) -> Tensor:
        """Return the mean of std_k over tokens seen k times, for k = 1, 2 ..: (heads, rows)."""
        tokens = torch.arange(self._seen, 0, -1, device=self._curve.device)
        return self._curve[:, : self._seen] / tokens

    def early(self) -> Tensor:
        """Return the share of tokens seen more than 50 times that peak within 50: (heads,).

        NaN without such tokens.
        """
        judged = self.peak[:, : max(0, self._seen - EARLY)]
        return (judged <= EARLY).double().mean(-1)


class Robustness:
    """Share of tokens with an early peak, and the mean curve, of every layer and KV head."""

    def __init__(self, tokens: int) -> None:
        """Expect `tokens` rows in all."""
        self._tokens = tokens
        self._layers: dict[int, Persistence] = {}

    def see(self, seen: Seen) -> None:
        """Take in the rows of a prompt or a decoded token."""
        if seen.slides:
            return
        if seen.layer not in self._layers:
            self._layers[seen.layer] = Persistence(
                seen.key.shape[0], self._tokens, seen.query.device
            )
        for _, weights in seen.group_rows():
            self._layers[seen.layer].add(weights)

    def results(self) -> dict[str, dict[int, Tensor]]:
        """Return (kv_heads,), and (kv_heads, steps)."""
        layers = self._layers.items()
        return {
            "robustness": {layer: found.early() for layer, found in layers},
            "robustness_curve": {layer: found.curve() for layer, found in layers},
        }
