"""Statistics of a prompt: column sums of its attention, moments of vectors, and surprisal.

Column sums: a fused kernel that attends a prompt knows the log-sum-exp of every row, and then the
weight of a key is exp(logit - log-sum-exp). So one product of queries and keys gives the sums, in
tiles that stay in a core's second cache, above whose diagonal nothing is computed. No row of
weights is written.

Moments: mean and scatter of vectors that come in parts, without storing any. Chan, Golub & LeVeque,
1979, "Updating formulae and a pairwise algorithm for computing sample variances". Each part is
centred on its own mean before it is multiplied out, so that nothing cancels, however far the mean
is from 0. Between prompts a scatter is held as its diagonal and its correlations in 8 bits, a
seventh of its bytes.

Surprisal: how unexpected a token was to the model, -log p in nats.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_TILE_ROWS = 512  # of a tile for each core, over the query heads of a group
_TILE_KEYS = 512  # with as many rows, 1 MiB of float32
_MOST_CORES = 4  # with more, too much of what a tile computes lies above the diagonal
_LOG2_E = math.log2(math.e)
_NEARLY_ONE = 1 - 1e-5  # of an average weight: a log-sum-exp of 100 is rounded by 4e-6


@torch.no_grad()
def add_causal_columns(
    sums: dict[str, Tensor],
    by_head: Tensor | None,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    *,
    scale: float,
) -> None:
    """Add what each token of a prompt receives from it and all later ones, in place.

    Args:
        sums: some of `kvtool.maths.columns.COLUMNS` by name, (kv_heads, n) float32: means over the
            query heads of a group.
        by_head: (kv_heads, group, n) float32, the sum of the weights for each of them; None: it is
            not wanted.
        query: (kv_heads, group, n, head_dim), after RoPE.
        key: (kv_heads, n, head_dim), after RoPE.
        lse: (kv_heads, group, n) float32, natural logarithms.
        scale: of the logits.
    """
    kv_heads, group, n, _ = query.shape
    # every operation waits for all cores, so each has a tile's share of its own
    rows = max(1, min(torch.get_num_threads(), _MOST_CORES) * _TILE_ROWS // group)
    memory = query.new_empty(group * rows * _TILE_KEYS, dtype=torch.float32)
    weighed = {name: total for name, total in sums.items() if name != "count"}
    for head in range(kv_heads):
        own = {name: total[head] for name, total in weighed.items()}
        apart = None if by_head is None else by_head[head]
        for start in range(0, n, rows):
            stop = min(start + rows, n)
            # exp2 takes a quarter of the time of exp, and its factor is that of the small operands
            tile = query[head, :, start:stop].float().mul(scale * _LOG2_E).flatten(0, 1)
            norm = lse[head, :, start:stop].mul(-_LOG2_E).reshape(-1, 1)
            for low in range(0, stop, _TILE_KEYS):
                high = min(low + _TILE_KEYS, stop)
                weights = memory[: len(tile) * (high - low)].view(-1, high - low)
                torch.addmm(norm, tile, key[head, low:high].float().T, out=weights).exp2_()
                weights = weights.view(group, stop - start, high - low)
                if high > start + 1:  # the last tiles of the rows: what comes later is not seen
                    first = max(low, start)
                    weights[..., first - low :].tril_(start - first)
                part = {name: total[low:high] for name, total in own.items()}
                _add_tile(part, None if apart is None else apart[:, low:high], weights, start)
    if "count" in sums:
        sums["count"] += torch.arange(n, 0, -1, device=key.device)


def _add_tile(sums: dict[str, Tensor], by_head: Tensor | None, weights: Tensor, start: int) -> None:
    """Add what some keys receive, (group, rows, keys), from the queries at `start` and behind."""
    group, rows, _ = weights.shape
    if by_head is not None:
        found = weights.sum(1)
        by_head += found
        if sums.keys() == {"attention_sum"}:
            sums["attention_sum"] += found.mean(0)
            return
    elif sums.keys() == {"attention_sum"}:
        sums["attention_sum"].add_(weights.flatten(0, 1).sum(0), alpha=1 / group)
        return
    if not sums:
        return
    mean = weights.mean(0)
    if "attention_sum" in sums:
        sums["attention_sum"] += mean.sum(0)
    if "above_average" in sums:
        seen = torch.arange(start + 1, start + rows + 1, device=mean.device)
        sums["above_average"] += (mean * seen[:, None] >= _NEARLY_ONE).sum(0)
    if "square_sum" in sums:
        sums["square_sum"] += mean.square_().sum(0)


def add_moments(
    count: Tensor, mean: Tensor, scatter: Tensor | None, vectors: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Add vectors to their number, their mean and the sum of their centred outer products.

    Args:
        count: (batch, heads) float32.
        mean: (batch, heads, dim) float32; 0 where nothing has been counted.
        scatter: (batch, heads, dim, dim) float32; None: not asked for.
        vectors: (batch, heads, tokens, dim) float32.
        valid: bool (batch or 1, tokens), which of them count.

    Returns:
        The three of all vectors so far.
    """
    others = ~valid[:, None, :, None]
    new = valid.sum(-1, keepdim=True).float()
    own = vectors.masked_fill(others, 0).sum(2) / new.clamp(min=1)[..., None]
    total = count + new
    share, step = new / total.clamp(min=1), own - mean
    if scatter is not None:
        centred = (vectors - own[:, :, None]).masked_fill(others, 0)
        scatter = scatter + centred.transpose(2, 3) @ centred
        between = step[..., None] * step[..., None, :]
        scatter = scatter + between * (count * share)[..., None, None]
    return total, mean + step * share[..., None], scatter


_STEPS = 127  # of a correlation of 1


def to_correlations(scatter: Tensor) -> tuple[Tensor, Tensor]:
    """Round a scatter, (.., dim, dim) float32, to its diagonal and correlations in 8 bits.

    Rounding what `from_correlations` returns gives the same again.

    Returns:
        (.., dim) float32, and (.., dim * (dim - 1) / 2) int8: 127 times what is below the diagonal
        of the correlations, row by row.
    """
    squares = scatter.diagonal(dim1=-2, dim2=-1).clone()
    lengths = squares.sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    row, column = _below_diagonal(squares)
    found = scatter[..., row, column] / lengths[..., row] / lengths[..., column]
    return squares, (found * _STEPS).round().clamp(-_STEPS, _STEPS).to(torch.int8)


def from_correlations(squares: Tensor, correlations: Tensor) -> Tensor:
    """Return the scatter, (.., dim, dim) float32, that was rounded by `to_correlations`."""
    row, column = _below_diagonal(squares)
    lengths = squares.sqrt()
    scatter = torch.diag_embed(squares)
    products = correlations.float() / _STEPS * lengths[..., row] * lengths[..., column]
    scatter[..., row, column] = products
    scatter[..., column, row] = products
    return scatter


def _below_diagonal(squares: Tensor) -> Tensor:
    """Return the row and the column of what is below a diagonal of this length, row by row."""
    dim = squares.shape[-1]
    return torch.tril_indices(dim, dim, offset=-1, device=squares.device)


_COLUMNS = 64  # logits that are turned into float32 at a time


def surprisals(logits: Tensor, tokens: Tensor, at: Tensor) -> Tensor:
    """Compute -log p of each token, by the logits of one column.

    Args:
        logits: (batch, columns, vocab), any float dtype.
        tokens: (batch, n) int64.
        at: (batch, n) int64, the column whose logits predict the token.

    Returns:
        (batch, n) float32, 0 or more.
    """

    parts = logits.split(_COLUMNS, 1)
    normaliser = torch.cat([part.float().logsumexp(-1) for part in parts], 1)
    rows = torch.arange(logits.shape[0], device=logits.device)[:, None]
    chosen = logits[rows, at, tokens].float()
    return (normaliser.gather(1, at) - chosen).clamp_(min=0)
