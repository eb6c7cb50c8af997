"""R-KV: keep what the newest tokens attend to and nothing else says, cutting every few tokens.

Cai et al., 2025, https://arxiv.org/abs/2505.24133, for models that fill their cache by reasoning.
Importance: the logits of the newest queries, their maximum over the query heads of a group, softmax
over the older slots, mean over the queries, max-pooled over neighbours by position. Redundancy: the
cosines of a key with all others, a column mean, softmax over all slots. In each row the latest
token that is alike (above `threshold`) counts for nothing, so that of many alike the newest stays.

Differences: `mix` is the paper's .1 (the authors' code has .07). As in their code, a row in which
nothing is alike leaves out the first slot's entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvtool.errors import UsageError
from kvtool.lazy_torch import Tensor, torch
from kvtool.maths.selection import pool_votes
from kvtool.policies.every import Every
from kvtool.policies.parts import AttentionRows, Count, Evidence, HeadSizes, Score, SlotView, State
from kvtool.policies.spelling import limited

_CHUNK = 128  # keys whose cosines with all others are held at a time
_PLACES = 8  # numbers of 4 bytes for the place of a slot and its order


def votes_of_queries(
    query: Tensor,
    valid: Tensor,
    keys: Tensor,
    older: Tensor,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Let queries vote on older slots: the mean of what each gives by its strongest head.

    Args:
        query: (batch, kv_heads, group, rows, head_dim), after RoPE.
        valid: bool (batch, rows), which queries there are.
        keys: (batch, kv_heads, slots, head_dim).
        older: bool (batch, kv_heads, slots), whom they vote on.

    Returns:
        (batch, kv_heads, slots) float32, 0 for the other slots.
    """
    logits = torch.einsum("bhgrd,bhsd->bhgrs", query.float(), keys.float()) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    strongest = logits.amax(2).masked_fill(~older[:, :, None], float("-inf"))
    votes = torch.softmax(strongest, -1).nan_to_num(0.0)  # of no older slot at all
    votes = votes * valid[:, None, :, None]
    return votes.sum(2) / valid.sum(-1).clamp(min=1)[:, None, None]


def redundancy(keys: Tensor, positions: Tensor, threshold: float) -> Tensor:
    """Measure how much of each key the others say, (batch, kv_heads, slots), rows sum to 1.

    Args:
        keys: (batch, kv_heads, slots, key_dim).
        positions: (batch, kv_heads, slots), -1 = empty, whose share is 0.
        threshold: cosine above which two keys are alike.
    """
    stored = positions >= 0
    unit = torch.nn.functional.normalize(keys.float(), dim=-1) * stored[..., None]
    order = positions.masked_fill(~stored, torch.iinfo(positions.dtype).max).argsort(-1)
    places = torch.arange(positions.shape[2], device=keys.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, places).float()  # exact below 2**24
    rank = rank.masked_fill_(~stored, 0)[:, :, None]
    total = unit @ unit.sum(2)[..., None]  # of whole columns: what does not count is taken off
    total = (total - unit.square().sum(-1, keepdim=True))[..., 0]
    for start in range(0, positions.shape[2], _CHUNK):
        cosine = unit[:, :, start : start + _CHUNK] @ unit.transpose(-1, -2)
        cosine.diagonal(start, -2, -1).zero_()
        alike = torch.gt(cosine, threshold, out=torch.empty_like(cosine))  # in floats: faster
        latest = alike.mul_(rank).amax(-1).long()  # the first slot where nothing is alike
        latest = order.gather(-1, latest)[..., None]
        total.scatter_add_(2, latest[..., 0], -cosine.gather(-1, latest)[..., 0])
    mean = total / stored.sum(-1, keepdim=True).clamp(min=1)
    return torch.softmax(mean.masked_fill(~stored, float("-inf")), -1)


@dataclass(frozen=True)
class RKV(Score):
    """Keep what the newest tokens attend to and no other token repeats; cut every few tokens.

    Args:
        window: newest tokens, which vote and are kept themselves.
        kernel: odd width of the pooling, in tokens; 1 = none.
        buffer: decoded tokens between two cuts, held above the budget.
        threshold: cosine of two keys above which the older one is redundant.
        mix: weight of importance against redundancy.
    """

    window: int = limited(8, "1 or more")
    kernel: int = limited(7, "odd and 1 or more")
    buffer: int = 128
    threshold: float = limited(0.5, "between -1 and 1")
    mix: float = limited(0.1, "between 0 and 1")

    name: ClassVar = "rkv"
    paper: ClassVar = "https://arxiv.org/abs/2505.24133"
    evidence: ClassVar = Evidence.QUERIES

    def __post_init__(self) -> None:
        if self.buffer < self.window:
            raise UsageError(
                f"rkv: buffer must be at least window, which is {self.window}, got {self.buffer}"
            )

    @property
    def pace(self) -> Every:
        return Every(self.buffer)

    def choosing_bytes(self, layer: HeadSizes, slots: int) -> int:
        """Count unit keys with two tiles of cosines, or keys, lengths and unit keys; and places."""
        numbers = max(layer.key_dim + 2 * _CHUNK, 3 * layer.key_dim) + _PLACES
        return 4 * numbers * layer.kv_heads * slots

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        if len(view.queries) != len(view.keys):
            raise RuntimeError("nobody has shown the newest queries")
        newest = view.recent(self.window)
        older = (view.positions >= 0) & ~newest
        votes, repeated = [], []
        parts = zip(
            view.keys,
            view.queries,
            view.positions.chunk(len(view.keys)),
            older.chunk(len(view.keys)),
            strict=True,
        )
        for keys, seen, positions, past in parts:
            query, valid = seen.by_kv_head(keys.shape[1])
            votes.append(votes_of_queries(query, valid, keys, past, seen.scale, seen.softcap))
            repeated.append(redundancy(keys, positions, self.threshold))
        pooled = pool_votes(
            torch.cat(votes), view.positions, newest, kernel=self.kernel, pool="max"
        )
        return self.mix * pooled - (1 - self.mix) * torch.cat(repeated)

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor:
        return view.recent(self.window)

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {"window": self.window}
