"""Second launch of attention over slots: joins the parts, and counts the weights meanwhile."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtool.kernels.tiles import add_to, width
from kvtool.maths.columns import COLUMNS, NEARLY_ONE

_SPLIT = 512  # slots that one program of the first launch reads, at least
_PARTS = 64  # at most
_KEYS = 128  # slots whose weights one program of the second launch finds


@triton.jit(do_not_specialize=["slots", "parts"])
def join_parts_kernel(
    logits,
    part_mean,
    part_top,
    part_total,
    part_seen,
    sinks,
    valid,
    out,
    attention_sum,
    square_sum,
    count,
    above_average,
    sinks_batch,
    sums_batch,
    sums_head,
    sums_heads,
    group,
    slots,
    parts,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    PARTS_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    SINKS: tl.constexpr,
    RAGGED: tl.constexpr,
    WEIGHTS: tl.constexpr,
    ATTENTION_SUM: tl.constexpr,
    SQUARE_SUM: tl.constexpr,
    COUNT: tl.constexpr,
    ABOVE_AVERAGE: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Compute the weights of a tile of slots of one KV head, and with the first tile the output."""
    own = tl.program_id(0) % sums_heads
    batch = (tl.program_id(0) // sums_heads).to(tl.int64)
    places = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    there = places < slots
    part = tl.arange(0, PARTS_WIDTH)
    real = part < parts
    columns = tl.arange(0, VALUE_WIDTH)
    counts = 1.0
    if RAGGED:
        counts = tl.load(valid + batch).to(tl.float32)
    mean = tl.zeros((KEYS,), tl.float32)
    stored = there
    seen = 0.0
    for member in range(group):
        head = own * group + member
        line = batch * sums_heads * group + head
        tops = tl.load(part_top + line * parts + part, mask=real, other=float("-inf"))
        totals = tl.load(part_total + line * parts + part, mask=real, other=0.0)
        seen = tl.sum(tl.load(part_seen + line * parts + part, mask=real, other=0.0), 0)
        top = tl.max(tops, 0)
        if SINKS:
            sink = tl.load(sinks + batch * sinks_batch + head).to(tl.float32)
            top = tl.maximum(top, sink)
        shares = tl.exp(tops - top)
        total = tl.sum(totals * shares, 0)
        if SINKS:
            total += tl.exp(sink - top)
        found = tl.load(logits + line * slots + places, mask=there, other=float("-inf"))
        stored = there & (found > float("-inf"))
        weights = tl.exp(found - top) / total * counts
        mean += weights
        if WEIGHTS:
            tl.store(logits + line * slots + places, weights, mask=there)
        if tl.program_id(1) == 0:
            values = tl.load(
                part_mean + (line * parts + part)[:, None] * VALUE_DIM + columns[None, :],
                mask=real[:, None] & (columns < VALUE_DIM)[None, :],
                other=0.0,
            )
            joined = tl.sum(values * shares[:, None], 0) / total
            tl.store(
                out + line * VALUE_DIM + columns,
                joined.to(out.dtype.element_ty),
                mask=columns < VALUE_DIM,
            )
    mean = mean / group

    line = batch * sums_batch + own.to(tl.int64) * sums_head + places
    if ATTENTION_SUM:
        add_to(attention_sum, line, mean, there)
    if SQUARE_SUM:
        add_to(square_sum, line, mean * mean, there)
    if COUNT:
        add_to(count, line, stored.to(tl.float32) * counts, there)
    if ABOVE_AVERAGE:
        add_to(above_average, line, (mean * seen >= LEAST).to(tl.float32), there)


@dataclass(frozen=True)
class Parts:
    """What the first launch leaves to the second.

    Attributes:
        split: slots of a part.
        logits: (batch, heads, slots) float32, -inf for an empty slot.
        mean: (batch, heads, parts, value_dim) float32, weighted values, not divided by the total.
        numbers: of each part, (batch, heads, parts) float32: the largest logit, the sum of
            exponentials and the count of stored slots.
    """

    split: int
    logits: Tensor
    mean: Tensor
    numbers: tuple[Tensor, ...]

    @property
    def count(self) -> int:
        """Return the number of parts."""
        return self.mean.shape[2]


def allocate_parts(query: Tensor, slots: int, value_dim: int) -> Parts:
    """Split the slots of a head among programs, and allocate what these leave.

    Args:
        query: (batch, heads, head_dim).
    """
    batch, heads, _ = query.shape
    split = max(_SPLIT, triton.cdiv(slots, _PARTS))
    parts = triton.cdiv(slots, split)
    return Parts(
        split,
        query.new_empty((batch, heads, slots), dtype=torch.float32),
        query.new_empty((batch, heads, parts, value_dim), dtype=torch.float32),
        query.new_empty((3, batch, heads, parts), dtype=torch.float32).unbind(),
    )


def join_parts(
    parts: Parts,
    dtype: torch.dtype,
    sums: dict[str, Tensor],
    kv_heads: int,
    *,
    sinks: Tensor | None,
    valid: Tensor | None,
    weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Join the parts into the output, and count the weights in place.

    Args:
        dtype: of the output.
        sums: some of `COLUMNS` by name, (batch, heads that are counted, slots) float32.
        kv_heads: heads that the weights are averaged over where nothing is counted.
        sinks, valid, weights: as for `kvtool.kernels.attend_slots.attend_slots`.

    Returns:
        (batch, heads, 1, value_dim), and the weights, (batch, heads, slots) float32, if wanted.
    """
    logits = parts.logits
    batch, heads, slots = logits.shape
    value_dim = parts.mean.shape[3]
    out = logits.new_empty((batch, heads, 1, value_dim), dtype=dtype)
    strides = {total.stride() for total in sums.values()} or {(0, 0, 1)}
    (stride,) = strides  # alike, or this raises
    kv_heads = next((total.shape[1] for total in sums.values()), kv_heads)
    tiles = triton.cdiv(slots, _KEYS) if sums or weights else 1
    with torch.cuda.device_of(logits):
        join_parts_kernel[(batch * kv_heads, tiles)](
            logits,
            parts.mean,
            *parts.numbers,
            logits if sinks is None else sinks,
            logits if valid is None else valid.to(torch.int32),
            out,
            *(sums.get(name, out) for name in COLUMNS),
            0 if sinks is None else sinks.stride(0),
            *stride[:2],
            kv_heads,
            heads // kv_heads,
            slots,
            parts.count,
            VALUE_DIM=value_dim,
            VALUE_WIDTH=width(value_dim),
            PARTS_WIDTH=triton.next_power_of_2(parts.count),
            KEYS=_KEYS,
            SINKS=sinks is not None,
            RAGGED=valid is not None,
            WEIGHTS=weights,
            **{name.upper(): name in sums for name in COLUMNS},
            LEAST=NEARLY_ONE,
        )
    return out, logits if weights else None
