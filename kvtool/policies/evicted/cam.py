"""CaM: the value of an evicted token is spread over the kept tokens that follow it.

Zhang et al., 2024, https://openreview.net/forum?id=LCTmppB165 (ICML). With the attention that each
token has accumulated, an evicted token i is merged with probability
min(1, sum_i / mean of the sums of the next m kept tokens), and then adds v_i / m to each of them.

Differences: the authors' code has three other denominators (recent window, maximum over the kept
tokens, the next 16) and tests for infinity where it means NaN; the accumulated mean over the next m
is the paper's. Where fewer than m kept tokens follow, those are used; where none do, the token is
dropped. Each draw is a hash of (seed, layer, KV head, tokens seen, position), so that a batch entry
draws what it would draw alone. Values grow in norm: that is the method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.lazy_torch import Tensor, torch
from kvtool.maths.selection import take
from kvtool.policies.evicted.eviction import Eviction, Merging
from kvtool.policies.numbers import State
from kvtool.policies.scores.random import seed_offset, uniform_draws
from kvtool.policies.spelling import limited

_CHUNK = 1024  # evicted tokens whose values are held in float64 at a time


def merge_probability(own: Tensor, following: Tensor, count: Tensor) -> Tensor:
    """Compute the probability with which evicted tokens are merged.

    Args:
        own: accumulated attention of the evicted tokens, at least 0.
        following: sum of the accumulated attention of the kept tokens after each of them.
        count: how many these are, at most m.

    Returns:
        float32 in [0, 1]; 0 where nothing follows, and for 0 / 0.
    """
    share = own * count / following
    share = torch.where(following > 0, share, (own > 0).float()).clamp(0, 1)
    return torch.where(count > 0, share, 0.0)


def spans(evicted: Tensor, kept: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Find where the next m kept tokens of each evicted one begin and end.

    >>> first, last = spans(torch.tensor([[[1, 5]]]), torch.tensor([[[0, 2, 4, 6, -1]]]), m=2)
    >>> first.tolist(), last.tolist()
    ([[[1, 3]]], [[[3, 4]]])

    Args:
        evicted: (batch, kv_heads, evicted) positions.
        kept: (batch, kv_heads, kept) ascending positions, -1 = empty at the end.

    Returns:
        Indices into kept, the first one and the one behind the last.
    """
    held = (kept >= 0).sum(-1, keepdim=True)
    ascending = kept.masked_fill(kept < 0, torch.iinfo(kept.dtype).max).contiguous()
    first = torch.searchsorted(ascending, evicted.contiguous(), right=True)
    first = torch.minimum(first, held)
    return first, torch.minimum(first + m, held)


def span_sums(numbers: Tensor, kept: Tensor, first: Tensor, m: int) -> Tensor:
    """Sum over the next m kept tokens of each evicted one.

    Each span is summed by itself: a difference of running sums would lose what is small beside
    their total.

    Args:
        numbers: (batch, kv_heads, kept) float32.
        kept: (batch, kv_heads, kept) positions, -1 = empty at the end.
        first: (batch, kv_heads, evicted) from `spans`.

    Returns:
        (batch, kv_heads, evicted) float32; 0 where nothing follows.
    """
    m = min(m, numbers.shape[-1])
    numbers = torch.nn.functional.pad(numbers.masked_fill(kept < 0, 0), (0, m))
    return numbers.unfold(-1, m, 1).sum(-1).gather(2, first)


def spread(
    values: Tensor, source: Tensor, evicted: Tensor, amount: Tensor, first: Tensor, last: Tensor
) -> Tensor:
    """Add the values of evicted tokens to their spans.

    What overlapping spans add up to is the running sum, in float64, of what begins less what ends.

    Args:
        values: (batch, kv_heads, kept, dim).
        source: (batch, kv_heads, slots, dim), which holds the evicted values.
        evicted: (batch, kv_heads, evicted) their indices in it.
        amount: (batch, kv_heads, evicted), what to multiply each by.
        first, last: (batch, kv_heads, evicted) from `spans`.

    Returns:
        (batch, kv_heads, kept, dim) in the dtype of `values`.
    """
    flow = torch.nn.functional.pad(torch.zeros_like(values, dtype=torch.float64), (0, 0, 0, 1))
    parts = (tensor.split(_CHUNK, -1) for tensor in (evicted, amount, first, last))
    for place, much, begin, end in zip(*parts, strict=True):
        token = take(source, place).double() * much[..., None]
        flow.scatter_add_(2, begin[..., None].expand_as(token), token)
        flow.scatter_add_(2, end[..., None].expand_as(token), -token)
    return (values.double() + flow.cumsum(2)[:, :, :-1]).to(values.dtype)


@dataclass(frozen=True)
class CaM(Merging):
    """Spread the value of each evicted token over the kept ones that follow it (CaM).

    Args:
        m: kept tokens that share a value.
        deterministic: add the share times its probability, instead of drawing.
        seed: selects the draws.
    """

    m: int = limited(32, "1 or more")
    deterministic: bool = False
    seed: int = limited(0, "0 or more")

    name: ClassVar = "cam"
    paper: ClassVar = "https://openreview.net/forum?id=LCTmppB165"
    statistics: ClassVar = ("attention_sum",)

    @property
    def draws(self) -> bool:
        """Return whether it draws, by its `seed`."""
        return not self.deterministic

    def absorb(self, memory: State, eviction: Eviction) -> Tensor:
        if eviction.decoded:
            return self._absorb_one(eviction)
        own = eviction.state["attention_sum"].gather(2, eviction.evicted)
        first, last = spans(eviction.evicted_positions, eviction.kept_positions, self.m)
        sums = eviction.kept_state["attention_sum"]
        following = span_sums(sums, eviction.kept_positions, first, self.m)
        amount = self._amount(eviction, own, following, last - first)
        kept = eviction.kept_values
        kept.copy_(spread(kept, eviction.values, eviction.evicted, amount, first, last))
        return amount > 0

    def _absorb_one(self, eviction: Eviction) -> Tensor:
        """Absorb one token of each head, whose kept ones are in no order."""
        positions, kept = eviction.kept_positions, eviction.kept_values
        last = torch.iinfo(positions.dtype).max
        later = positions.masked_fill(positions <= eviction.evicted_positions, last)
        nearest = later.topk(min(self.m, later.shape[-1]), -1, largest=False, sorted=False)
        follows = nearest.values < last
        sums = eviction.kept_state["attention_sum"].gather(2, nearest.indices)
        own = eviction.state["attention_sum"].gather(2, eviction.evicted)
        following = sums.masked_fill(~follows, 0).sum(-1, keepdim=True)
        count = follows.sum(-1, keepdim=True)
        amount = self._amount(eviction, own, following, count)
        merged = amount > 0
        amount = torch.where(follows, amount, 0.0)[..., None]
        value = take(eviction.values, eviction.evicted)
        old = take(kept, nearest.indices)
        new = (old.float() + amount * value.float()).to(kept.dtype)
        kept.scatter_(2, nearest.indices[..., None].expand_as(new), new)
        return merged

    def _amount(self, eviction: Eviction, own: Tensor, following: Tensor, count: Tensor) -> Tensor:
        """Compute how much of each evicted value every token of its span gets."""
        chance = merge_probability(own, following, count)
        if not self.deterministic:
            chance = (self._draws(eviction) < chance).float()
        chance = chance.masked_fill(eviction.evicted_positions < 0, 0)
        return chance / count.clamp(min=1)

    def _draws(self, eviction: Eviction) -> Tensor:
        positions = eviction.evicted_positions
        held = positions.shape[1]
        heads = torch.arange(held, device=positions.device) + eviction.heads.first(held)
        stream = (heads[:, None] << 50) + eviction.tokens_seen * 1_000_003 + eviction.layer
        stream = stream + seed_offset(self.seed)
        return uniform_draws(positions, stream)
