"""Refit: the values that a cut prompt keeps are fitted to the output of the whole prompt.

After Attention Matching, Zweiger et al., 2026, https://arxiv.org/abs/2602.16284, whose values are
fitted by least squares. For each KV head, Q are the last queries of the prompt, of all query heads
that read it. A is their softmax over the kept keys, O their attention output over all keys, each
query seeing what it saw in the prompt. The kept values V become
V + (A^T A + p I)^-1 A^T (O - A V), with p = ridge * trace(A^T A) / kept. Keys stay as they are.

Differences from the paper: it also moves the log-sum-exp by a bias of each key, and fits to queries
of several kinds; here the policy alone chooses what stays, and no key has a bias. The penalty pulls
towards the values as they are, not towards 0. With `kvzip` the queries are those of the
repetition, at equal steps over all of it, since no query of the prompt has seen what comes later.

The default penalty is small, and spoils exact retrieval: it fits what those queries saw, and tokens
of little weight get values far from their own. With a ridge of 1 the bundled model loses a code of
100 (kvtool/policies/reference.md).

A further turn is cut again. Its own last queries are used, over what the cache holds then: values
that were refitted before, and the turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.lazy_torch import Tensor, torch
from kvtool.policies.evicted.eviction import Eviction, Merging
from kvtool.policies.evidence import PromptQueries
from kvtool.policies.numbers import State
from kvtool.policies.spelling import limited

_ROWS = 128  # queries whose weights on all keys are held at a time, of one KV head


@dataclass(frozen=True)
class Refit(Merging):
    """Refit the values that a cut prompt keeps to what its last queries saw of all of it.

    Args:
        queries: last queries of the prompt to fit to, of each query head.
        ridge: penalty of changing values, as a share of the mean squared weight of a kept token.
    """

    queries: int = limited(64, "1 or more")
    ridge: float = limited(0.01, "above 0")

    name: ClassVar = "refit"
    paper: ClassVar = "https://arxiv.org/abs/2602.16284"
    works_on_keys: ClassVar = True

    def absorb(self, memory: State, eviction: Eviction) -> Tensor:
        seen = eviction.queries
        if seen is None or seen.slots is None:
            raise RuntimeError("no query of the prompt has been kept")
        lost = eviction.evicted_positions >= 0
        known = (seen.positions >= 0).any(-1)[:, None]
        for head in range(lost.shape[1]):
            kept = eviction.kept_values[:, head : head + 1]
            new = _refitted(eviction, seen, seen.slots, head, self.ridge)
            changed = lost[:, head : head + 1].any(-1) & known
            kept.copy_(torch.where(changed[..., None, None], new, kept))
        return lost & known[..., None]


def _refitted(
    eviction: Eviction, seen: PromptQueries, slots: Tensor, head: int, ridge: float
) -> Tensor:
    """Return what the kept values of a KV head become: (batch, 1, kept, value_dim) float64."""
    from kvtool.maths.refit import value_change

    own = slice(head, head + 1)
    values, kept = eviction.values[:, own].float(), eviction.kept_values[:, own].float()
    there = eviction.kept_positions[:, own]
    parts = []
    for start in range(0, seen.positions.shape[1], _ROWS):
        rows = slice(start, start + _ROWS)
        whole = _weights(seen, rows, head, eviction.keys, slots)
        few = _weights(seen, rows, head, eviction.kept_keys, eviction.kept_positions)
        parts.append((few, whole @ values - few @ kept))
    weights, missing = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    return kept + value_change(weights, missing, (there >= 0).sum(-1), ridge)


def _weights(
    seen: PromptQueries, rows: slice, head: int, keys: Tensor, positions: Tensor
) -> Tensor:
    """Compute the weights of the queries of a group on keys: (batch, 1, group * rows, slots)."""
    from kvtool.maths.attention import attention_weights_lse, group_queries, visible_keys

    own = slice(head, head + 1)
    query = group_queries(seen.query[:, :, rows], keys.shape[1])[:, own].float()
    new = seen.positions[:, rows]
    spans = None if seen.spans is None else seen.spans[:, rows]
    sinks = None if seen.sinks is None else seen.sinks.view(keys.shape[1], -1)[own]
    weights, _ = attention_weights_lse(
        query,
        keys[:, own].float(),
        scale=seen.scale,
        visible=visible_keys(new, positions[:, own], spans=spans),
        softcap=seen.softcap,
        sinks=sinks,
    )
    valid = (new >= 0)[:, None, None, :, None]
    return (weights * valid).flatten(2, 3)
