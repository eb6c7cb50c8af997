"""Judge scores as RoCo does: by what they keep step by step, and by when attention stops changing.

Overlap (figure 2): after each token the set that is kept under the budget (its members' attention
renormalised, what is gone stays gone) is compared with the top of the same score with nothing
evicted. The overlap is their Jaccard index, averaged over all tokens beyond the budget, which is a
share of the whole text. The paper evicts in earnest, so that errors run through the layers; here
each layer reads the full run's attention. https://arxiv.org/abs/2402.06262

The scores are RoCo's. They are the sum of a token's attention (`aas`, H2O), how often it is at
least average (`aqas`, Scissorhands), its last one (`ltas`, TOVA), and its mean over the steps since
it came (`mas`). No recent window protects anything.

Robustness (figure 3): std_k of a token is the population standard deviation of the attention that
it gets in its first k steps, its own step included. Scores are robust where std_k peaks early and
then falls. The paper counts tokens whose peak is within 50 steps; we count among the tokens that
were seen for longer than that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvtool.maths.selection import lowest, order_key
from kvtool.profiling.seen import Seen

SCORES = ("aas", "aqas", "ltas", "mas")
RATES = (0.3, 0.4, 0.5, 0.6)


def jaccard_index(one: Tensor, other: Tensor) -> Tensor:
    """Return the share of the members of either set that are in both.

    Args:
        one, other: bool (..., members), not both empty.

    Returns:
        (...).
    """
    return (one & other).sum(-1) / (one | other).sum(-1)


class _Score:
    """A score that follows the rows of one layer; the leading axes are whatever the rows have."""

    def __init__(self, name: str, shape: Sequence[int], device: torch.device | str) -> None:
        self._name = name
        self._sum = torch.zeros(*shape, dtype=torch.float32, device=device)
        self._count = torch.zeros(*shape, dtype=torch.float32, device=device)

    def add(self, row: Tensor, stored: Tensor) -> Tensor:
        """Take in a row of weights over the first slots, and return their scores.

        Args:
            row: (.., keys), 0 where a slot is not stored.
            stored: bool, as the row.
        """
        keys = row.shape[-1]
        total, count = self._sum[..., :keys], self._count[..., :keys]
        if self._name == "ltas":
            return row
        if self._name == "aqas":
            visible = stored.sum(-1, keepdim=True)
            total += (row >= 1 / visible) & stored
            return total
        total += row
        if self._name == "aas":
            return total
        count += stored
        return total / count.clamp(min=1)


class Overlap:
    """Local and global sets of one score in one layer, for several budgets."""

    def __init__(
        self,
        score: str,
        heads: int,
        tokens: int,
        budgets: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        """Expect `tokens` rows in all."""
        shape = (len(budgets), heads, tokens)
        self._budgets = torch.tensor(budgets, device=device)
        self._local = _Score(score, shape, device)
        self._global = _Score(score, shape[1:], device)
        self._stored = torch.zeros(shape, dtype=torch.bool, device=device)
        self._positions = torch.arange(tokens, device=device)
        self._sum = torch.zeros(shape[:2], dtype=torch.float64, device=device)
        self._seen = 0

    def add(self, row: Tensor) -> None:
        """Take in the weights of the next token over all tokens so far: (heads, keys)."""
        keys = row.shape[-1]
        self._seen = keys
        self._stored[..., keys - 1] = True
        stored = self._stored[..., :keys]
        local = row * stored
        local = local / local.sum(-1, keepdim=True).clamp(min=torch.finfo(row.dtype).tiny)
        kept = self._local.add(local, stored)
        everything = self._global.add(row, torch.ones_like(row, dtype=torch.bool))
        over = self._budgets < keys
        if not bool(over.any()):
            return
        positions = self._positions[:keys].expand_as(stored)
        victim = lowest(kept, positions, ~stored)
        stay = stored.scatter(-1, victim[..., None], False)
        self._stored[..., :keys] = torch.where(over[:, None, None], stay, stored)
        order = order_key(everything, positions[0]).argsort(-1, descending=True)
        rank = torch.empty_like(order).scatter_(-1, order, positions[0])
        index = jaccard_index(self._stored[..., :keys], rank < self._budgets[:, None, None])
        self._sum += torch.where(over[:, None], index.double(), 0.0)

    def mean(self) -> Tensor:
        """Return the mean Jaccard index over the tokens beyond the budget: (heads, budgets).

        NaN for a budget that everything fits.
        """
        judged = (self._seen - self._budgets).clamp(min=0)
        return (self._sum / judged[:, None]).T


class Jaccard:
    """Overlap of the local and the global set of every layer, per KV head, score and rate."""

    def __init__(self, tokens: int, scores: Sequence[str] = SCORES) -> None:
        """Expect `tokens` rows in all."""
        self._tokens, self._scores = tokens, scores
        self._budgets = [max(1, int(rate * tokens + 1e-9)) for rate in RATES]
        self._layers: dict[int, list[Overlap]] = {}

    def see(self, seen: Seen) -> None:
        """Take in the rows of a prompt or a decoded token."""
        if seen.slides:
            return
        if seen.layer not in self._layers:
            heads, device = seen.key.shape[0], seen.query.device
            self._layers[seen.layer] = [
                Overlap(score, heads, self._tokens, self._budgets, device) for score in self._scores
            ]
        for first, weights in seen.group_rows():
            for i in range(weights.shape[1]):
                for overlap in self._layers[seen.layer]:
                    overlap.add(weights[:, i, : first + i + 1])

    def results(self) -> dict[str, dict[int, Tensor]]:
        """Return (kv_heads, rates) for every score, as `jaccard_aas` ..."""
        return {
            f"jaccard_{score}": {layer: found[i].mean() for layer, found in self._layers.items()}
            for i, score in enumerate(self._scores)
        }


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
