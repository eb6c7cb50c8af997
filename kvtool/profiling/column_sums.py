"""Measure the spread of attention over tokens: variance and entropy of its column sums.

D2O (https://arxiv.org/abs/2406.13035) gives more of the cache to layers whose attention is spread
evenly: equation 4 takes the variance of the column sums, appendix A.9 argues with entropy. With
s_j the attention that token j gets from all n queries of a prompt (their sum is n, or less where a
sink beside the keys draws a part):

    F = mean (s_j - mean s)^2   the population variance; nothing is divided by n
    H = -sum p_j log p_j        with p_j = s_j / sum s; we report H / log n, which is 1 at its most
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvtool.cache.steps.attend_triton import can_run
from kvtool.kernels.checks import Family
from kvtool.maths.statistics import add_causal_columns
from kvtool.profiling.seen import Seen

_ROWS = 128  # rows of weights, over the query heads of a group, that are held at a time


def f_variance(sums: Tensor) -> Tensor:
    """Return the population variance of column sums.

    Args:
        sums: (..., n).

    Returns:
        (...).
    """
    return sums.double().var(-1, correction=0)


def column_entropy(sums: Tensor) -> Tensor:
    """Return the entropy of column sums over log n: 1 if all are equal, 0 if one token gets all.

    Args:
        sums: (..., n), not negative.

    Returns:
        (...).
    """
    sums = sums.double()
    shares = sums / sums.sum(-1, keepdim=True)
    terms = torch.special.xlogy(shares, shares).sum(-1)
    return terms / -math.log(sums.shape[-1]) if sums.shape[-1] > 1 else torch.ones_like(terms)


def column_sums(seen: Seen) -> Tensor:
    """Sum the attention that each token of a prompt gets from all its queries.

    Returns:
        (heads, n) float32.
    """
    heads, n, _ = seen.query.shape
    kv_heads = seen.key.shape[0]
    group = heads // kv_heads
    sums = torch.zeros(kv_heads, group, n, dtype=torch.float32, device=seen.query.device)
    if seen.lse is not None and can_run(seen.call, Family.ROWS, seen.step.layer.window):
        return _sums_by_kernel(seen, seen.lse)
    if seen.lse is not None:
        query, lse = (each.unflatten(0, (kv_heads, group)) for each in (seen.query, seen.lse))
        add_causal_columns({}, sums, query, seen.key, lse, scale=seen.call.scale)
        return sums.flatten(0, 1)
    rows = max(1, _ROWS // group)
    for head in range(kv_heads):  # one at a time, so that the weights stay in the processor's cache
        for start in range(0, n, rows):
            stop = min(start + rows, n)
            weights, low = seen.weights(start, stop, slice(head, head + 1))
            sums[head, :, low:stop] += weights[0].sum(1)
    return sums.flatten(0, 1)


def _sums_by_kernel(seen: Seen, lse: Tensor) -> Tensor:
    """Compute the same in one pass of a kernel, from the log-sum-exp of all rows."""
    from kvtool.kernels import column_sums as kernel

    sums, order = torch.zeros_like(lse), torch.arange(lse.shape[1], device=lse.device)
    kernel.column_sums(
        *(seen.query[None], seen.key[None], order[None], order[None, None]),
        *(lse[None], None, {"attention_sum": sums[None]}),
        scale=seen.call.scale,
        window=seen.step.layer.window,
        softcap=seen.call.softcap,
    )
    return sums


class Density:
    """Variance and entropy of the column sums of every layer's prompt, per query head."""

    def __init__(self) -> None:
        self._found: dict[str, dict[int, Tensor]] = {"f_variance": {}, "entropy": {}}

    def see(self, seen: Seen) -> None:
        """Sum the attention of a prompt; decoded tokens do not count."""
        if seen.decoding:
            return
        sums = column_sums(seen).double()
        self._found["f_variance"][seen.layer] = f_variance(sums)
        self._found["entropy"][seen.layer] = column_entropy(sums)

    def results(self) -> dict[str, dict[int, Tensor]]:
        """Return (heads,) each."""
        return self._found
