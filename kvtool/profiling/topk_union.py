"""Count the different tokens ever among the k most attended in decoding (RocketKV, figure 2).

Where few are, a first stage that keeps as many loses little to the second stage that picks k of
them for each step. https://arxiv.org/abs/2502.14051
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.profiling.seen import Seen

TOP_K = 256


def first_steps(query: Tensor, key: Tensor, k: int) -> Tensor:
    """Return the first decoded step that has each token among its `k` most attended.

    Args:
        query: (kv_heads, group, steps, head_dim), those of the last `steps` keys.
        key: (kv_heads, kv_len, head_dim).

    Returns:
        (kv_heads, group, kv_len) int64; `steps` for a token that is never among them.
    """
    kv_heads, group, steps, head_dim = query.shape
    kv_len = key.shape[1]
    later = torch.ones(steps, steps, dtype=torch.bool, device=key.device).triu(1)
    first = torch.full((kv_heads, group, kv_len + 1), steps, device=key.device)
    number = torch.arange(steps, device=key.device)[:, None]
    for head in range(kv_heads):
        # a softmax, a softcap and a sink change no order
        logits = (query[head].reshape(-1, head_dim) @ key[head].T).float()
        logits = logits.view(group, steps, kv_len)
        logits[..., kv_len - steps :].masked_fill_(later, float("-inf"))
        top = logits.topk(min(k, kv_len), -1, sorted=False)
        chosen = torch.where(top.values == float("-inf"), kv_len, top.indices)
        step = number.expand_as(chosen)
        first[head].scatter_reduce_(1, chosen.flatten(1), step.flatten(1), "amin")
    return first[..., :kv_len]


def growth(first: Tensor, steps: int) -> Tensor:
    """Count the tokens that have been among the most attended after each step.

    Args:
        first: (..., kv_len), as of `first_steps`.

    Returns:
        (..., steps) float64.
    """
    new = torch.zeros(*first.shape[:-1], steps + 1, dtype=torch.float64, device=first.device)
    new.scatter_add_(-1, first, torch.ones_like(first, dtype=torch.float64))
    return new[..., :steps].cumsum(-1)


class TopKUnion:
    """Growth of the union of the top-k of every layer, per query head and per KV head."""

    def __init__(self, steps: int) -> None:
        """Expect `steps` decoded tokens."""
        self._steps = steps
        self._queries: dict[int, list[Tensor]] = {}
        self._found: dict[str, dict[int, Tensor]] = {"topk_union": {}, "topk_union_group": {}}

    def see(self, seen: Seen) -> None:
        """Keep the queries of decoded tokens; at the last, count over all of them."""
        if not seen.decoding or seen.slides:
            return
        queries = self._queries.setdefault(seen.layer, [])
        queries.append(seen.query.clone())
        if len(queries) < self._steps:
            return
        query = torch.cat(self._queries.pop(seen.layer), 1).unflatten(0, (seen.key.shape[0], -1))
        first = first_steps(query, seen.key, TOP_K)
        self._found["topk_union"][seen.layer] = growth(first.flatten(0, 1), self._steps)
        self._found["topk_union_group"][seen.layer] = growth(first.amin(1), self._steps)

    def results(self) -> dict[str, dict[int, Tensor]]:
        """Return (heads, steps), and (kv_heads, steps) where a group shares what it picks."""
        return self._found
