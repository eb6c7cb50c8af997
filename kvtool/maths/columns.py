"""Columns of attention by name: what each slot receives from many queries.

A weight here is the mean over the query heads that share a KV head. Everything is a sum over
queries, so it can be added up in chunks, or by a kernel that never writes the weights down.
"""

from __future__ import annotations

from kvtool.lazy_torch import Tensor

COLUMNS = (
    "attention_sum",  # of the weights
    "square_sum",  # of their squares
    "count",  # of the queries that could see the slot
    "above_average",  # of the queries that gave it at least 1 / (keys that they see)
)
NEARLY_ONE = 1 - 1e-6  # of an average weight: the rounding of an even row decides nothing


def add_columns(
    sums: dict[str, Tensor],
    weights: Tensor,
    visible: Tensor | None = None,
    valid: Tensor | None = None,
) -> None:
    """Add what each slot receives from some queries, in place.

    Args:
        sums: some of `COLUMNS` by name, (batch, kv_heads, slots) float32. Weights that stop short
            of the last slots leave those as they are.
        weights: (batch, kv_heads, group, rows, keys) float32, 0 in rows of padding.
        visible: bool, broadcastable to (batch, kv_heads, rows, keys); None: all.
        valid: bool (batch, rows), False where the row is padding; None: no padding.
    """
    keys = weights.shape[-1]
    sums = {name: total[..., :keys] for name, total in sums.items()}
    if sums.keys() == {"attention_sum"}:
        sums["attention_sum"].add_(weights.sum((2, 3)), alpha=1 / weights.shape[2])
        return
    mean = weights.mean(2)
    for name, total in sums.items():
        total += _COLUMN[name](mean, visible, valid)


def column_variance(sums: Tensor, stored: Tensor) -> Tensor:
    """Compute the population variance of what slots receive, whatever its mean.

    D2O (https://arxiv.org/abs/2406.13035), equation 4. The mean is 1 only where a whole prompt
    attends to itself and no part of the attention goes to a sink beside the keys.

    Args:
        sums: (..., slots) float32.
        stored: bool, broadcastable to (..., slots): the slots that count.

    Returns:
        (...) float32; 0 where nothing is stored.
    """
    return centred(sums, stored)[1][..., 0]


def centred(numbers: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers less their mean over stored slots, 0 elsewhere, and their variance (.., 1)."""
    count = stored.sum(-1, keepdim=True).clamp(min=1)
    mean = numbers.masked_fill(~stored, 0).sum(-1, keepdim=True) / count
    apart = (numbers - mean).masked_fill(~stored, 0)
    return apart, apart.square().sum(-1, keepdim=True) / count


def _attention_sum(mean: Tensor, visible: Tensor | None, valid: Tensor | None) -> Tensor:
    return _down(mean)


def _square_sum(mean: Tensor, visible: Tensor | None, valid: Tensor | None) -> Tensor:
    return _down(mean.square())


def _count(mean: Tensor, visible: Tensor | None, valid: Tensor | None) -> Tensor | int:
    if visible is None:
        return mean.shape[2] if valid is None else valid.sum(1)[:, None, None]
    return (visible if valid is None else visible & valid[:, None, :, None]).sum(2)


def _above_average(mean: Tensor, visible: Tensor | None, valid: Tensor | None) -> Tensor:
    keys = mean.shape[-1] if visible is None else visible.sum(-1, keepdim=True)
    return _down(mean * keys >= NEARLY_ONE)


def _down(rows: Tensor) -> Tensor:
    return rows[:, :, 0] if rows.shape[2] == 1 else rows.sum(2)


_COLUMN = dict(zip(COLUMNS, (_attention_sum, _square_sum, _count, _above_average), strict=True))
