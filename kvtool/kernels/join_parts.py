"""Second launch of attention over slots: joins the parts, and counts the weights meanwhile.

Where a policy's choice can be said in numbers (`Choice`), the same launch finds the slot that the
next token takes: one program of each head sees all of its slots then.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtool.kernels.choose_slot import Choice, count_held, limits, lowest_slot, numbers_of
from kvtool.kernels.tiles import add_to, width
from kvtool.maths.columns import COLUMNS, NEARLY_ONE

_SPLIT = 64  # slots that one program of the first launch reads, at least
_PARTS = 64  # at most
_KEYS = 128  # slots whose weights one program of the second launch finds at a time
_WIDEST = 1024  # where one program goes through all of them


@triton.jit
def joined_softmax(part_top, part_total, sinks, line, part, parts, SINKS: tl.constexpr):
    """Join the softmax of the parts of one row: largest logit, sum, and the factor of each part."""
    real = part < parts
    tops = tl.load(part_top + line * parts + part, mask=real, other=float("-inf"))
    totals = tl.load(part_total + line * parts + part, mask=real, other=0.0)
    top = tl.max(tops, 0)
    if SINKS:
        sink = tl.load(sinks).to(tl.float32)
        top = tl.maximum(top, sink)
    shares = tl.exp(tops - top)
    total = tl.sum(totals * shares, 0)
    if SINKS:
        total += tl.exp(sink - top)
    return top, total, shares


@triton.jit
def count_weights(
    attention_sum,
    square_sum,
    count,
    above_average,
    line,
    mean,
    stored,
    seen,
    there,
    ATTENTION_SUM: tl.constexpr,
    SQUARE_SUM: tl.constexpr,
    COUNT: tl.constexpr,
    ABOVE_AVERAGE: tl.constexpr,
    LEAST: tl.constexpr,
    SCORE: tl.constexpr,
):
    """Add a row's weights to the columns, and return the sums by which slots are ranked, if any."""
    score = mean
    if ATTENTION_SUM:
        sums = add_to(attention_sum, line, mean, there)
        if SCORE == "attention_sum":
            score = sums
    if SQUARE_SUM:
        add_to(square_sum, line, mean * mean, there)
    if COUNT:
        add_to(count, line, stored, there)
    if ABOVE_AVERAGE:
        sums = add_to(above_average, line, (mean * seen >= LEAST).to(tl.float32), there)
        if SCORE == "above_average":
            score = sums
    return score


@triton.jit(do_not_specialize=["slots", "parts", "recent", "first", "budget"])
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
    positions,
    next_slot,
    tokens_seen,
    budgets,
    sinks_batch,
    sums_batch,
    sums_head,
    stored_batch,
    stored_head,
    seen_batch,
    sums_heads,
    group,
    slots,
    parts,
    recent,
    first,
    budget,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    PARTS_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    SINKS: tl.constexpr,
    RAGGED: tl.constexpr,
    VALID_FROM: tl.constexpr,
    COUNTED: tl.constexpr,
    WEIGHTS: tl.constexpr,
    ATTENTION_SUM: tl.constexpr,
    SQUARE_SUM: tl.constexpr,
    COUNT: tl.constexpr,
    ABOVE_AVERAGE: tl.constexpr,
    LEAST: tl.constexpr,
    ADVANCES: tl.constexpr,
    SCORE: tl.constexpr,
    PADDED: tl.constexpr,
    BUDGETS: tl.constexpr,
):
    """Compute the weights of tiles of slots of one KV head, and with the first tile the output."""
    own = tl.program_id(0) % sums_heads
    batch = (tl.program_id(0) // sums_heads).to(tl.int64)
    part = tl.arange(0, PARTS_WIDTH)
    real = part < parts
    columns = tl.arange(0, VALUE_WIDTH)
    counts = 1.0
    if RAGGED:
        counts = (tl.load(valid + batch) >= VALID_FROM).to(tl.float32)
    sums_line = batch * sums_batch + own.to(tl.int64) * sums_head
    positions += batch * stored_batch + own.to(tl.int64) * stored_head
    next_slot += batch * sums_heads + own
    if SCORE != "":
        budget, recent = limits(budgets, batch, budget, recent, BUDGETS)
        tokens = tl.load(tokens_seen + batch * seen_batch).to(tl.int32)
        over = True
        if PADDED:
            over = count_held(positions, slots, KEYS) > budget
        best = tl.full((), float("inf"), tl.float32)
        newest = tl.full((), -6, tl.int32)
        slot = tl.full((), 0, tl.int32)
    if ADVANCES and tl.program_id(1) == 0:
        tl.store(next_slot, tl.load(next_slot) + 1)
    stop = slots
    if not COUNTED and SCORE == "":
        stop = 1
    for low in range(tl.program_id(1) * KEYS, stop, tl.num_programs(1) * KEYS):
        places = low + tl.arange(0, KEYS)
        there = places < slots
        mean = tl.zeros((KEYS,), tl.float32)
        stored = there
        seen = 0.0
        for member in range(group):
            head = own * group + member
            line = batch * sums_heads * group + head
            sink = sinks + batch * sinks_batch + head
            top, total, shares = joined_softmax(
                part_top, part_total, sink, line, part, parts, SINKS
            )
            seen = tl.sum(tl.load(part_seen + line * parts + part, mask=real, other=0.0), 0)
            if COUNTED:
                found = tl.load(logits + line * slots + places, mask=there, other=float("-inf"))
                stored = there & (found > float("-inf"))
                weights = tl.exp(found - top) / total * counts
                mean += weights
                if WEIGHTS:
                    tl.store(logits + line * slots + places, weights, mask=there)
            if low == 0:
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
        score = count_weights(
            attention_sum,
            square_sum,
            count,
            above_average,
            sums_line + places,
            mean,
            stored.to(tl.float32) * counts,
            seen,
            there,
            ATTENTION_SUM,
            SQUARE_SUM,
            COUNT,
            ABOVE_AVERAGE,
            LEAST,
            SCORE,
        )
        if SCORE != "":
            held = tl.load(positions + places, mask=there, other=-1)
            if SCORE == "position":
                score = held.to(tl.float32)
            best, newest, slot = lowest_slot(
                score, held, places, there, tokens, recent, first, over, best, newest, slot, PADDED
            )
    if SCORE != "":
        tl.store(next_slot, slot.to(tl.int64))


@dataclass(frozen=True)
class Parts:
    """What the first launch leaves to the second.

    Attributes:
        slots: of all parts.
        split: slots of a part.
        logits: (batch, heads, slots) float32, -inf for an empty slot; None: nothing is counted.
        mean: (batch, heads, parts, value_dim) float32, weighted values, not divided by the total.
        numbers: of each part, (batch, heads, parts) float32: the largest logit, the sum of
            exponentials and the count of stored slots.
    """

    slots: int
    split: int
    logits: Tensor | None
    mean: Tensor
    numbers: tuple[Tensor, ...]

    @property
    def count(self) -> int:
        """Return the number of parts."""
        return self.mean.shape[2]


def allocate_parts(query: Tensor, slots: int, value_dim: int, *, counted: bool = True) -> Parts:
    """Split the slots of a head among programs, and allocate what these leave.

    Args:
        query: (batch, heads, head_dim).
        counted: whether the weights of slots are asked for.
    """
    batch, heads, _ = query.shape
    split = _SPLIT * triton.cdiv(slots, _SPLIT * _PARTS)
    parts = triton.cdiv(slots, split)
    logits = None
    if counted:
        logits = query.new_empty((batch, heads, slots), dtype=torch.float32)
    return Parts(
        slots,
        split,
        logits,
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
    slot: Tensor | None = None,
    positions: Tensor | None = None,
    choice: Choice | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Join the parts into the output, and count the weights in place.

    Args:
        dtype: of the output.
        sums: some of `COLUMNS` by name, (batch, heads that are counted, slots) float32.
        kv_heads: heads that the weights are averaged over where nothing is counted.
        sinks, weights: as for `kvtool.kernels.attend_slots.attend_slots`.
        valid: (batch,), False, or a position below 0, where a row's query is padding.
        slot: (batch, kv_heads) int64, which is raised by one, or set where there is a choice.
        positions: (batch, kv_heads, slots) int32, of which a choice is made.
        choice: how; None: none is made.

    Returns:
        (batch, heads, 1, value_dim), and the weights, (batch, heads, slots) float32, if wanted.
    """
    mean, logits = parts.mean, parts.logits
    batch, heads, _, value_dim = mean.shape
    out = mean.new_empty((batch, heads, 1, value_dim), dtype=dtype)
    strides = {total.stride() for total in sums.values()} or {(0, 0, 1)}
    (stride,) = strides  # alike, or this raises
    kv_heads = next((total.shape[1] for total in sums.values()), kv_heads)
    keys, tiles = _KEYS, triton.cdiv(parts.slots, _KEYS) if sums or weights else 1
    if choice is not None:
        keys, tiles = min(_WIDEST, max(_KEYS, triton.next_power_of_2(parts.slots))), 1
    positional = valid is not None and valid.dtype != torch.bool
    if valid is not None and not positional:
        valid = valid.to(torch.int32)
    shown = mean if positions is None else positions
    tokens, budgets, seen_batch, *numbers = numbers_of(choice, mean)
    with torch.cuda.device_of(mean):
        join_parts_kernel[(batch * kv_heads, tiles)](
            mean if logits is None else logits,
            mean,
            *parts.numbers,
            mean if sinks is None else sinks,
            mean if valid is None else valid,
            out,
            *(sums.get(name, out) for name in COLUMNS),
            shown,
            mean if slot is None else slot,
            tokens,
            budgets,
            0 if sinks is None else sinks.stride(0),
            *stride[:2],
            *shown.stride()[:2],
            seen_batch,
            kv_heads,
            heads // kv_heads,
            parts.slots,
            parts.count,
            *numbers,
            VALUE_DIM=value_dim,
            VALUE_WIDTH=width(value_dim),
            PARTS_WIDTH=triton.next_power_of_2(parts.count),
            KEYS=keys,
            SINKS=sinks is not None,
            RAGGED=valid is not None,
            VALID_FROM=0 if positional else 1,
            COUNTED=logits is not None,
            WEIGHTS=weights,
            **{name.upper(): name in sums for name in COLUMNS},
            LEAST=NEARLY_ONE,
            ADVANCES=slot is not None and choice is None,
            SCORE="" if choice is None else choice.score,
            PADDED=choice is not None and valid is not None,
            BUDGETS=choice is not None and isinstance(choice.budget, Tensor),
            num_warps=8 if keys > _KEYS else 4,
        )
    return out, logits if weights else None
