"""The only top-k: ties go to the lower position, protection is a mask, empty slots come last.

Slots need not be in order of position: after some decoding they are not. Every choice here uses
positions. Votes of the last queries are smoothed over neighbours before one is made of them.
"""

from __future__ import annotations

from kvtool.lazy_torch import Tensor, torch

_FORCED = 0x7FFFFFFF << 32  # above the key of every float, infinity included
_EMPTY = -(0x7FFFFFFF << 32)  # below the key of every float, minus infinity included
_FEW = 1024  # numbers of which sorting all takes less time than making keys for the best


def order_key(scores: Tensor, positions: Tensor) -> Tensor:
    """Make an integer per slot that sorts by score, then by position, the lower one first.

    The bits of a float, read as an integer, sort like the float once the negative half is mirrored.
    They go to the upper half of the key, the position to the lower half, so no two slots tie and
    any sort or top-k of the keys is stable.

    Args:
        scores: (..., slots) float32, no NaN.
        positions: (..., slots) integers below 2**31.

    Returns:
        (..., slots) int64.
    """
    bits = (scores.float() + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return ordered.bitwise_left_shift_(32) - positions


def top_mask(
    scores: Tensor, positions: Tensor, count: int | Tensor, among: Tensor | None = None
) -> Tensor:
    """Mark the `count` slots of highest score.

    Args:
        scores: (batch, kv_heads, slots) float32.
        positions: (batch, kv_heads, slots), -1 = empty, never marked.
        count: how many, one number or (batch or 1, kv_heads or 1, 1); at most the number in
            `among`.
        among: bool (batch, kv_heads, slots), the slots to choose from, none empty; None: all
            that are stored.

    Returns:
        bool (batch, kv_heads, slots).
    """
    allowed = positions >= 0 if among is None else among
    key = torch.where(allowed, order_key(scores, positions), _EMPTY)
    if isinstance(count, torch.Tensor):
        last = (count - 1).clamp(min=0).expand(*key.shape[:-1], 1)
        threshold = key.sort(-1, descending=True).values.gather(-1, last)
        return (key >= threshold) & allowed & (count > 0)
    if count == 0:
        return torch.zeros_like(allowed)
    return key >= key.kthvalue(key.shape[-1] - count + 1, -1, keepdim=True).values


def top_slots(scores: Tensor, count: int) -> Tensor:
    """Find the `count` slots of highest score, the best first; ties go to the lower index.

    >>> top_slots(torch.tensor([0.1, 0.3, 0.3, 0.2]), 2).tolist()
    [1, 2]

    Args:
        scores: (..., slots) float32, no NaN.

    Returns:
        (..., count) int64.
    """
    if scores.shape[-1] <= _FEW:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    places = torch.arange(scores.shape[-1], device=scores.device)
    return order_key(scores, places).topk(count, -1).indices


def keep_top(
    scores: Tensor,
    positions: Tensor,
    budget: int | Tensor,
    forced: Tensor | None,
    slots: int,
    *,
    in_order: bool = False,
) -> tuple[Tensor, Tensor]:
    """Choose the slots that stay: the forced ones, then those of highest score.

    Args:
        scores: (batch, kv_heads, kv_len) float32, higher = keep.
        positions: (batch, kv_heads, kv_len), -1 = empty.
        budget: slots kept per KV head, one number or (batch, 1, 1).
        forced: bool (batch, kv_heads, kv_len), kept whatever their score; None: none.
        slots: the largest budget, and the width of the result; at most kv_len.
        in_order: whether positions are known to ascend, and no slot to be empty.

    Returns:
        indices (batch, kv_heads, slots) into kv_len, in ascending position, and the positions found
        there; where a head keeps fewer than `slots` its tail has position -1.
    """
    key = order_key(scores, positions)
    if forced is not None:
        key = torch.where(forced, _FORCED - positions.long(), key)
    if in_order and not isinstance(budget, torch.Tensor):
        indices = key.topk(slots, -1, sorted=False).indices.sort(-1).values
        return indices, positions.gather(-1, indices)
    key.masked_fill_(positions < 0, _EMPTY)
    indices = key.topk(slots, -1).indices
    kept = positions.gather(-1, indices)
    if isinstance(budget, torch.Tensor):
        beyond = torch.arange(slots, device=scores.device) >= budget
        kept = kept.masked_fill(beyond, -1)
    last = torch.iinfo(kept.dtype).max
    order = kept.masked_fill(kept < 0, last).argsort(-1)
    return indices.gather(-1, order), kept.gather(-1, order)


def lowest(
    scores: Tensor, positions: Tensor, protected: Tensor | None = None, distinct: bool = False
) -> Tensor:
    """Find the slot to evict: the lowest score, and among equals the highest position.

    Args:
        scores: (batch, kv_heads, slots) float32, no NaN.
        positions: (batch, kv_heads, slots).
        protected: bool (batch, kv_heads, slots), never chosen; at least one slot must be free.
        distinct: no two stored slots have the same score, so ties need no care.

    Returns:
        (batch, kv_heads) int64 index of a slot.
    """
    if protected is not None:
        scores = scores.masked_fill(protected, float("inf"))
    if distinct:
        return scores.argmin(-1)
    if protected is not None:
        positions = positions.masked_fill(protected, -3)
    worst = scores == scores.amin(-1, keepdim=True)
    return torch.where(worst, positions, -3).argmax(-1)


def take(tensor: Tensor, indices: Tensor) -> Tensor:
    """Copy the slots at `indices`: (batch, heads, slots, dim) by (batch, heads or 1, count)."""
    heads, dim = tensor.shape[1], tensor.shape[-1]
    return tensor.gather(2, indices[..., None].expand(-1, heads, -1, dim))


def pool_votes(
    votes: Tensor,
    positions: Tensor,
    window: Tensor,
    *,
    kernel: int,
    pool: str,
    in_order: bool = False,
) -> Tensor:
    """Smooth votes over neighbouring tokens, leaving the observation window out.

    Average pooling divides by `kernel` at the borders too, as the authors' code does.

    Args:
        votes: (batch, kv_heads, slots) float32.
        positions: (batch, kv_heads, slots), -1 = empty; neighbours are neighbours by position.
        window: bool (batch, kv_heads, slots), the observation window, the last tokens.
        kernel: odd width, in tokens.
        pool: `max` or `avg`.
        in_order: whether positions are known to ascend, and no slot to be empty.

    Returns:
        (batch, kv_heads, slots); inside the window the votes as they came.
    """
    width = min(kernel, 2 * votes.shape[-1] - 1)  # a wider one sees no more, and takes long
    outside = float("-inf") if pool == "max" else 0.0
    if in_order:
        past = votes.masked_fill(window, outside)
    else:
        last = torch.iinfo(positions.dtype).max
        order = positions.masked_fill(positions < 0, last).argsort(-1)
        past = votes.masked_fill(window | (positions < 0), outside).gather(-1, order)
    if pool == "max":
        pooled = torch.nn.functional.max_pool1d(past, width, stride=1, padding=width // 2)
    else:
        pooled = torch.nn.functional.avg_pool1d(past, width, stride=1, padding=width // 2)
        pooled = pooled if width == kernel else pooled * (width / kernel)
    if not in_order:
        pooled = torch.empty_like(pooled).scatter_(-1, order, pooled)
    return torch.where(window, votes, pooled)
