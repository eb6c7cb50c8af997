"""LagKV: keep what varies on the scale of the tokens that follow; no attention is looked at.

Liang et al., 2025, https://arxiv.org/abs/2504.04704. Behind the first `sinks` tokens, a prompt is
divided into partitions of `lag` tokens. Each channel of a partition's keys is brought to the range
of that channel in the next partition: 0 at its minimum, 1 at its maximum. A token's result is the
standard deviation over its channels, after a softmax over the tokens of the partition. Results of
keys and of values are averaged. The score is the rank of the result in its partition, divided by
`lag`, so that every partition gives up the same share. The last whole partition, which has no next
one, and the remainder behind it are kept.

Differences from the paper: it compresses a partition once, when the next one is there, to a fixed
share; here, as in kvpress, one cut brings the prompt to the budget. A channel that has a single
value in the next partition counts as 0, where a division by 0 would give NaN. Of equal results the
lower position ranks lower. Ranks of different heads are equal numbers, so with `+ada` the results
themselves (`rank=false`) say which head needs more.

In a prompt run in blocks, in later turns, and where heads keep different tokens, partitions are of
the tokens that a head holds, in their order, with any gaps between them. So each partition has
`lag` tokens to choose from, and a whole one to be compared with. A budget below sinks + 2 lag could
be filled by the tokens that are kept anyway: partitions then have a quarter of it, sinks apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvtool.lazy_torch import Tensor, torch
from kvtool.maths.selection import take
from kvtool.policies.parts import AttentionRows, Count, Evidence, Score, SlotView, State
from kvtool.policies.spelling import limited

_LEAST = 2  # tokens of a partition
_TOKENS = 4096  # that are brought to their range at a time


def results_of_partitions(keys: Tensor, values: Tensor) -> Tensor:
    """Measure the tokens of all partitions but the last, each on the scale of the next one.

    Args:
        keys, values: (batch, kv_heads, partitions, lag, dim).

    Returns:
        (batch, kv_heads, partitions - 1, lag) float32, which sum to 1 in each partition.
    """
    return (_spread(keys.float()) + _spread(values.float())) / 2


def _spread(tokens: Tensor) -> Tensor:
    low, high = tokens[:, :, 1:].aminmax(dim=-2, keepdim=True)
    width = high - low
    scaled = torch.where(width > 0, (tokens[:, :, :-1] - low) / width, 0.0)
    return scaled.std(-1).softmax(-1)


def ranks(results: Tensor) -> Tensor:
    """Rank along the last axis, from 0 for the lowest; of equals the first ranks lower."""
    return results.argsort(stable=True, dim=-1).argsort(-1)


def _by_place(positions: Tensor, sinks: int) -> Tensor:
    """Indices of slots in ascending position, sinks and empty slots last."""
    last = torch.iinfo(positions.dtype).max
    return positions.masked_fill(positions < sinks, last).argsort(-1)


@dataclass(frozen=True)
class LagKV(Score):
    """Keep the prompt tokens that vary most on the scale of the tokens that follow; then append.

    Args:
        sinks: first tokens that are always kept.
        lag: tokens of a partition; fewer where the budget is below sinks + 2 lag.
        rank: whether tokens compete by their rank in their partition, and not by the result, by
            which heads of a layer may be compared (`+ada`).
    """

    sinks: int = limited(4, "0 or more")
    lag: int = limited(128, "2 or more")
    rank: bool = True

    name: ClassVar = "lagkv"
    paper: ClassVar = "https://arxiv.org/abs/2504.04704"
    evidence: ClassVar = Evidence.KEYS
    when: ClassVar = "prompt"

    def _lag(self, budget: Count) -> Count:
        """Return how many tokens a partition has under a budget."""
        limit = self.sinks + 2 * self.lag
        if isinstance(budget, int):
            return self.lag if budget >= limit else max((budget - self.sinks) // 4, _LEAST)
        short = ((budget - self.sinks) // 4).clamp(min=_LEAST)
        return short.where(budget < limit, self.lag)

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        lags = torch.as_tensor(self._lag(view.budget))
        heads = lags.shape[1] if lags.dim() else 1
        own: list[list[int]] = lags.expand(len(view.positions), heads, 1)[..., 0].tolist()
        if len({lag for row in own for lag in row}) == 1:
            return self._importance(view, (slice(None), slice(None)), own[0][0])
        places = [slice(None)] if heads == 1 else [slice(i, i + 1) for i in range(heads)]
        entries = []
        for i, row in enumerate(own):
            parts = zip(places, row, strict=True)
            scores = [self._importance(view, (slice(i, i + 1), head), lag) for head, lag in parts]
            entries.append(torch.cat(scores, 1))
        return torch.cat(entries)

    def _importance(self, view: SlotView, lanes: tuple[slice, slice], lag: int) -> Tensor:
        """Score heads of batch entries whose partitions have equally many tokens.

        What stays anyway has a score of 1.
        """
        order = _by_place(view.positions[lanes], self.sinks)
        scores = torch.ones(order.shape, device=order.device)
        step = max(_TOKENS // lag, 1) * lag
        judged = (order.shape[-1] // lag - 1) * lag  # at most; a head may hold fewer
        for start in range(0, judged, step):
            stop = min(start + step, judged)
            chunk = order[:, :, start : stop + lag]
            keys, values = (take(each[0][lanes], chunk) for each in (view.keys, view.values))
            results = results_of_partitions(
                keys.unflatten(2, (-1, lag)), values.unflatten(2, (-1, lag))
            )
            if self.rank:
                results = ranks(results) / lag
            scores.scatter_(2, order[:, :, start:stop], results.flatten(2))
        return scores.masked_fill(self._stays(view.positions[lanes], order, lag), 1.0)

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor:
        order = _by_place(view.positions, self.sinks)
        return self._stays(view.positions, order, self._lag(view.budget))

    def _stays(self, positions: Tensor, order: Tensor, lag: Count) -> Tensor:
        """Mark sinks, the last whole partition, what follows it, and empty slots."""
        behind = positions >= self.sinks
        judged = (behind.sum(-1, keepdim=True) // lag - 1) * lag
        return ~behind | (order.argsort(-1) >= judged)

    def reserved(self, budget: int) -> Mapping[str, int]:
        lag = self._lag(budget)
        return {"sinks": self.sinks, "lag": 2 * int(lag) - 1}  # the remainder is below another lag
