"""D2O's merging: an evicted token joins the kept one of most similar key, if similar enough.

Wan et al., 2024, https://arxiv.org/abs/2406.13035, section 4.3, equations 6 to 12. The threshold
tau is a moving average of the highest similarities: their mean at the first eviction, then
beta * mean + (1 - beta) * tau. A kept token and those that go into it are averaged with weights
exp of their similarity to it, its own similarity being 1.

Differences from the paper: equation 12 as printed gives every merged token the sum of all weights,
so that they exceed 1 when two go into one. Here each has its own weight, as the text says.
Threshold and decision are per KV head (the paper leaves heads out). The authors' code is another
method: it weighs by raw similarity, has one threshold per layer and averages its mask over heads.
Merged keys mix the rotations of different positions, as in the paper; `merge=v` leaves keys alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvtool.lazy_torch import Tensor, torch
from kvtool.maths.selection import take
from kvtool.policies.evicted.eviction import Eviction, Merging
from kvtool.policies.numbers import State
from kvtool.policies.spelling import limited

_SELF = math.e  # exp of a token's similarity to itself
_CHUNK = 128  # evicted tokens whose similarity to every kept token is held at a time, on a CPU
_PAIRS = 2**24  # similarities held at a time elsewhere, where launching takes longer than comparing
_EPSILON = 1e-8


def nearest_kept(evicted: Tensor, kept: Tensor, kept_positions: Tensor) -> tuple[Tensor, Tensor]:
    """Find the kept key most similar to each evicted one, ties to the lower position.

    Args:
        evicted: (batch, kv_heads, evicted, head_dim).
        kept: (batch, kv_heads, kept, head_dim) float32, of length 1.
        kept_positions: (batch, kv_heads, kept), -1 = empty, never the nearest.

    Returns:
        Cosine similarity, (batch, kv_heads, evicted) float32, and index of the kept key, int64.
    """
    evicted = unit_keys(evicted)
    cosine = evicted @ kept.transpose(-1, -2)
    positions = kept_positions[:, :, None]
    cosine = cosine.masked_fill_(positions < 0, float("-inf"))
    best = cosine.amax(-1, keepdim=True)
    last = torch.iinfo(positions.dtype).max
    return best[..., 0], torch.where(cosine == best, positions, last).argmin(-1)


def unit_keys(keys: Tensor) -> Tensor:
    """Bring keys to length 1, in float32."""
    return torch.nn.functional.normalize(keys.float(), dim=-1, eps=_EPSILON)


def next_threshold(tau: Tensor, similarity: Tensor, valid: Tensor, beta: float) -> Tensor:
    """Move the threshold by the similarities of some evicted tokens.

    Args:
        tau: (batch, kv_heads) float32, NaN before the first eviction.
        similarity: (batch, kv_heads, evicted) float32.
        valid: bool (batch, kv_heads, evicted), False where no token leaves; a head that loses none
            keeps its threshold.
    """
    count = valid.sum(-1)
    mean = similarity.masked_fill(~valid, 0).sum(-1) / count
    moved = torch.where(tau.isnan(), mean, tau + beta * (mean - tau))
    return torch.where(count > 0, moved, tau)


def blend(kept: Tensor, share: Tensor, total: Tensor) -> Tensor:
    """Average of kept tokens and what goes into them.

    Args:
        kept: (..., dim) keys or values.
        share: (..., dim) float32, sum of the merged ones times exp of their similarity.
        total: (...) float32, sum of these exp.

    Returns:
        (..., dim) in the dtype of `kept`.
    """
    mixed = (_SELF * kept.float() + share) / (_SELF + total)[..., None]
    return mixed.to(kept.dtype)


def merge_one(kept: Tensor, evicted: Tensor, target: Tensor, weight: Tensor) -> None:
    """Merge one token of each head into its target, in place.

    Args:
        kept: (batch, kv_heads, kept, dim).
        evicted: (batch, kv_heads, 1, dim).
        target: (batch, kv_heads, 1) index into kept.
        weight: (batch, kv_heads, 1) float32, exp of the similarity; 0 = do not merge.
    """
    index = target[..., None].expand(-1, -1, -1, kept.shape[-1])
    old = kept.gather(2, index)
    new = blend(old, weight[..., None] * evicted.float(), weight)
    kept.scatter_(2, index, torch.where(weight[..., None] > 0, new, old))


def merge_many(
    kept: Tensor, source: Tensor, evicted: Tensor, target: Tensor, weight: Tensor
) -> None:
    """Merge any number of tokens of each head into their targets, in place.

    Args:
        kept: (batch, kv_heads, kept, dim).
        source: (batch, kv_heads, slots, dim), which holds the evicted tokens.
        evicted: (batch, kv_heads, evicted) their indices in it.
        target, weight: as for `merge_one`, (batch, kv_heads, evicted).
    """
    share = torch.zeros(kept.shape, dtype=torch.float32, device=kept.device)
    total = torch.zeros(kept.shape[:3], dtype=torch.float32, device=kept.device).scatter_add_(
        2, target, weight
    )
    for place, to, amount in _chunks(kept, evicted, target, weight):
        token = take(source, place).float()
        share.scatter_add_(2, to[..., None].expand_as(token), token.mul_(amount[..., None]))
    kept.copy_(torch.where(total[..., None] > 0, blend(kept, share, total), kept))


def _chunks(kept: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split what is of evicted tokens into as many as are merged into `kept` at a time."""
    count = _CHUNK
    if kept.device.type != "cpu":
        count = max(count, _PAIRS // max(1, math.prod(kept.shape[:-1])))
    return zip(*(tensor.split(count, -1) for tensor in tensors), strict=True)


@dataclass(frozen=True)
class D2OMerge(Merging):
    """Merge each evicted token into the kept one of most similar key, if similar enough (D2O).

    Args:
        beta: weight of the newest similarity in the moving threshold.
        merge: `kv` merges keys and values, `v` values alone.
    """

    beta: float = limited(0.7, "above 0 and at most 1")
    merge: Literal["kv", "v"] = "kv"

    name: ClassVar = "d2o-merge"
    paper: ClassVar = "https://arxiv.org/abs/2406.13035"
    works_on_keys: ClassVar = True

    def start(self, batch: int, kv_heads: int, device: torch.device) -> State:
        return {
            "tau": torch.full((batch, kv_heads), float("nan"), dtype=torch.float32, device=device)
        }

    def absorb(self, memory: State, eviction: Eviction) -> Tensor:
        keys, evicted = eviction.keys, eviction.evicted
        unit = unit_keys(eviction.kept_keys)
        parts = [
            nearest_kept(take(keys, place), unit, eviction.kept_positions)
            for (place,) in _chunks(unit, evicted)
        ]
        similarity, target = (torch.cat(part, -1) for part in zip(*parts, strict=True))
        valid = eviction.evicted_positions >= 0
        tau = next_threshold(memory["tau"], similarity, valid, self.beta)
        memory["tau"].copy_(tau)
        merged = valid & (similarity >= tau[..., None])
        weight = torch.where(merged, similarity.exp(), 0.0)
        both = [(eviction.values, eviction.kept_values)]
        both += [(keys, eviction.kept_keys)] if self.merge == "kv" else []
        for source, kept in both:
            if eviction.decoded:
                merge_one(kept, take(source, evicted), target, weight)
            else:
                merge_many(kept, source, evicted, target, weight)
        return merged
