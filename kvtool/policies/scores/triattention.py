"""TriAttention: keep the keys to which the centre of the queries points, seen from many distances.

Mao et al., 2026, https://arxiv.org/abs/2604.04921, for models that fill their cache by reasoning.
Before RoPE the queries of a head gather round a centre. With queries and keys as complex numbers,
one for each pair f that RoPE turns by omega_f a position, the prompt's queries q have the centre
mu_f = E[q_f] and the mean length m_f = E|q_f|. A key k_f before RoPE at position p gets, at time t,

    S = sum_f |mu_f| |k_f| Re( exp(i (omega_f (t - p) + arg(mu_f conj k_f))) W_f )
        + sum_f (m_f - |mu_f|) |k_f|

where W_f is the mean of exp(i omega_f d) over d = 1, 2, 4 .. `horizon`. S is standardised over the
tokens that the head holds, for each query head, and the maximum over the group is the score. Up to
budget + `every` tokens are held, and then one selection cuts back to the budget.

The position of a key cancels out. The first sum is the dot product of the key as it is stored,
after RoPE, with the centre rotated to t and averaged over the distances. So no key is rotated back.

Differences: the authors take the centres from 50 thousand and more tokens of any text beforehand,
as `kvtool profile --metrics query_centres` does for `stats`. Without such a file they are those of
the prompt, later turns included. The prompt stays by default, as theirs does, but counts in the
budget. Scaled rotations (YaRN) multiply queries and keys by a factor, of which S has the square.
Numbers that a model does not rotate are paired in the layout of the others, with omega 0. In a
model without RoPE omega is 0 throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvtool.lazy_torch import Tensor, torch
from kvtool.maths.columns import centred
from kvtool.policies.every import Every
from kvtool.policies.evidence import AttentionRows, MomentsAsked, QueryMoments
from kvtool.policies.numbers import PROMPT, Count, State, at_least_zero, half, minimum
from kvtool.policies.parts import Evidence, Score, SlotView
from kvtool.policies.scores.shared import moments_of_layers
from kvtool.policies.spelling import computed, limited

_SLOTS = 1024  # keys that are measured at a time
_NARROWEST = 1e-6  # standard deviation that scores are divided by, at least


def distances(horizon: int) -> list[int]:
    """Return the distances 1, 2, 4 .. up to a horizon.

    >>> distances(10)
    [1, 2, 4, 8]
    """
    return [1 << power for power in range(horizon.bit_length())]


def pull_of_centres(
    keys: Tensor, queries: QueryMoments, tokens_seen: Count, horizon: int
) -> Tensor:
    """Compute S of every key: what later queries near the centre are expected to give it.

    Args:
        keys: (batch, kv_heads, slots, head_dim), after RoPE.
        queries: of all heads, with the mean lengths of their pairs.
        tokens_seen: t, the position of the next token.

    Returns:
        (batch, kv_heads, group, slots) float32.
    """
    if queries.lengths is None:
        raise ValueError("this score needs the lengths of the queries' pairs, and was given none")
    heads = keys.shape[1]
    centre = queries.mean_ahead(tokens_seen, distances(horizon)).unflatten(1, (heads, -1))
    spread = queries.lengths - queries.pair_lengths(queries.mean)
    spread = spread.unflatten(1, (heads, -1))
    parts = []
    for part in keys.split(_SLOTS, 2):
        states = part.float()
        along = centre @ states.transpose(2, 3)
        parts.append(along + spread @ queries.pair_lengths(states).transpose(2, 3))
    return torch.cat(parts, -1)


def standardised(numbers: Tensor, stored: Tensor) -> Tensor:
    """Shift and scale numbers to mean 0 and standard deviation 1 over the stored slots.

    Args:
        numbers: (batch, kv_heads, group, slots).
        stored: bool (batch, kv_heads, slots).

    Returns:
        The like, 0 in empty slots.
    """
    apart, variance = centred(numbers, stored[:, :, None])
    return apart / variance.sqrt().clamp(min=_NARROWEST)


@dataclass(frozen=True)
class TriAttention(Score):
    """Keep the tokens to which the centre of the queries points; cut every few tokens.

    Args:
        every: decoded tokens between two cuts, held above the budget.
        recent: newest tokens that are always kept; at most half of the budget, or of what the
            prompt leaves of it where that stays.
        horizon: largest distance from which the centre looks at a token.
        prompt: keep all of the prompt, and evict among what is generated.
        stats: a safetensors file of centres that `kvtool profile` wrote; None: the prompt's own.
    """

    every: int = limited(128, "1 or more")
    recent: int = limited(128, "0 or more")
    horizon: int = limited(65536, "1 or more")
    prompt: bool = True
    stats: str | None = computed("those of the prompt")

    name: ClassVar = "triattention"
    paper: ClassVar = "https://arxiv.org/abs/2604.04921"
    evidence: ClassVar = Evidence.MOMENTS

    @property
    def moments(self) -> MomentsAsked:
        return MomentsAsked(covariance=False, lengths=True, stats=self.stats)

    @property
    def pace(self) -> Every:
        return Every(self.every)

    @property
    def keeps_prompt(self) -> bool:
        return self.prompt

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        layers = len(view.keys)
        stored = (view.positions >= 0).chunk(layers)
        seen = view.tokens_seen
        each = [seen] * layers
        if not isinstance(seen, int) and len(seen) > 1:
            each = list(seen.chunk(layers))
        scores = []
        for keys, queries, own, now in zip(
            view.keys, moments_of_layers(view), stored, each, strict=True
        ):
            pull = pull_of_centres(keys, queries, now, self.horizon)
            scores.append(standardised(pull, own).amax(2))
        return torch.cat(scores)

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor | None:
        budget = view.budget
        if PROMPT in state:  # of what the prompt leaves
            prompt = state[PROMPT].sum(-1, keepdim=True).to(view.positions.dtype)
            budget = at_least_zero(budget - prompt)
        return view.recent(minimum(self.recent, half(budget)))

    def reserved(self, budget: int) -> Mapping[str, int]:
        return {"recent": min(self.recent, half(budget))}
