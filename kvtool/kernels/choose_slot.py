"""The slot that the next token takes, where a policy's choice can be said in numbers.

It is chosen while sums are counted, which `kvtool.kernels.join_parts` does. What CAOTE makes of the
sums needs all values, in a launch of its own.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtool.kernels.tiles import load_tile, width

_VALUES = 8192  # numbers of a tile of values


class Choice(NamedTuple):
    """How the slot that the next token takes follows from numbers.

    Attributes:
        score: what ranks slots: one of `COLUMNS`, or `position`.
        by_values: whether the score is weighed by the values, as CAOTE does.
        recent, first: newest and first tokens that stay.
        budget: slots that a head may keep.
        seen: (batch or 1,) int64, tokens so far with the running one.
    """

    score: str
    by_values: bool
    recent: int
    first: int
    budget: int
    seen: Tensor

    def numbers(self) -> tuple[Tensor | int, ...]:
        """Lay it out for a kernel."""
        stride = self.seen.stride(0) if len(self.seen) > 1 else 0
        return self.seen, stride, self.recent, self.first, self.budget


@triton.jit
def load_choice(numbers, batch, positions, slots, KEYS: tl.constexpr, PADDED: tl.constexpr):
    """Find the first position of the recent window, how many slots are held, and the budget."""
    start = tl.load(numbers[0] + batch * numbers[1]).to(tl.int32) - numbers[2]
    count = slots
    if PADDED:
        held = tl.zeros((KEYS,), tl.int32)
        for low in range(0, slots, KEYS):
            places = low + tl.arange(0, KEYS)
            held += (tl.load(positions + places, mask=places < slots, other=-1) >= 0).to(tl.int32)
        count = tl.sum(held, 0)
    return start, count


@triton.jit
def no_slot():
    """Return what every slot is better than: a score, a position and a place."""
    best = tl.full((), float("inf"), tl.float32)
    return best, tl.full((), -6, tl.int32), tl.full((), 0, tl.int32)


@triton.jit
def lowest_slot(
    score, held, places, there, start, first, over, best, newest, slot, PADDED: tl.constexpr
):
    """Find the slot to evict, of a tile and the best before, as `kvtool.maths.selection.lowest`."""
    protected = (held >= start) | (held < first)
    if PADDED:  # a row below its budget takes an empty slot, one above it none
        empty = held < 0
        protected = (protected | empty) & over
        score = tl.where(empty & ~protected, float("-inf"), score)
    score = tl.where(protected | ~there, float("inf"), score)
    held = tl.where(there, tl.where(protected, -3, held), -4)
    least = tl.min(score, 0)
    last = tl.max(tl.where(score == least, held, -5), 0)
    found = tl.min(tl.where((score == least) & (held == last), places, 2147483647), 0)
    better = (least < best) | ((least == best) & (last > newest))
    best = tl.where(better, least, best)
    return best, tl.where(better, last, newest), tl.where(better, found, slot)


@triton.jit
def load_share(scores, positions, places, slots, total, equal):
    """Load positions of slots, and their shares of all scores."""
    held = tl.load(positions + places, mask=places < slots, other=-1)
    share = tl.load(scores + places, mask=held >= 0, other=0.0)
    return held, tl.where(held >= 0, tl.where(total > 0, share / total, equal), 0.0)


@triton.jit(do_not_specialize=["slots"])
def choose_by_values_kernel(
    scores,
    value,
    positions,
    next_slot,
    numbers,
    strides,
    heads,
    slots,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Choose the slot of one head whose loss moves the output least: `policies.rescore.caote`."""
    own = (tl.program_id(0) % heads).to(tl.int64)
    batch = (tl.program_id(0) // heads).to(tl.int64)
    scores += batch * strides[0] + own * strides[1]
    positions += batch * strides[2] + own * strides[3]
    value += batch * strides[4] + own * strides[5]
    start, count = load_choice(numbers, batch, positions, slots, KEYS, PADDED)

    total = tl.zeros((KEYS,), tl.float32)
    for low in range(0, slots, KEYS):
        places = low + tl.arange(0, KEYS)
        total += load_share(scores, positions, places, slots, 1.0, 0.0)[1]
    total, equal = tl.sum(total, 0), 1.0 / count
    mean = tl.zeros((VALUE_WIDTH,), tl.float32)
    for low in range(0, slots, KEYS):
        places = low + tl.arange(0, KEYS)
        held, share = load_share(scores, positions, places, slots, total, equal)
        values = load_tile(value, places, strides[6], slots, VALUE_DIM, VALUE_WIDTH)
        mean += tl.sum(values.to(tl.float32) * share[:, None], 0)
    best, newest, slot = no_slot()
    for low in range(0, slots, KEYS):
        places = low + tl.arange(0, KEYS)
        held, share = load_share(scores, positions, places, slots, total, equal)
        values = load_tile(value, places, strides[6], slots, VALUE_DIM, VALUE_WIDTH)
        apart = values.to(tl.float32) - mean[None, :]
        apart = tl.where((tl.arange(0, VALUE_WIDTH) < VALUE_DIM)[None, :], apart, 0.0)
        score = share / tl.maximum(1 - share, 1e-6) * tl.sqrt(tl.sum(apart * apart, 1))
        score = tl.where(1 - share < 1e-6, float("inf"), score)
        there, over = places < slots, count > numbers[4]
        best, newest, slot = lowest_slot(
            score, held, places, there, start, numbers[3], over, best, newest, slot, PADDED
        )
    tl.store(next_slot + batch * heads + own, slot.to(tl.int64))


def choose_by_values(
    scores: Tensor, value: Tensor, positions: Tensor, slot: Tensor, choice: Choice, *, padded: bool
) -> None:
    """Choose the slot of each head whose loss moves the output least, and write it to `slot`.

    Args:
        scores: (batch, kv_heads, slots) float32, of which the shares are made.
        value: (batch, kv_heads, slots, value_dim).
        positions: (batch, kv_heads, slots) int32.
        slot: (batch, kv_heads) int64, contiguous.
        padded: whether batch entries hold different counts.
    """
    batch, heads, slots, value_dim = value.shape
    strides = *scores.stride()[:2], *positions.stride()[:2], *value.stride()[:3]
    with torch.cuda.device_of(value):
        choose_by_values_kernel[(batch * heads,)](
            *(scores, value, positions, slot, choice.numbers(), strides, heads, slots),
            VALUE_DIM=value_dim,
            VALUE_WIDTH=width(value_dim),
            KEYS=_VALUES // width(value_dim),
            PADDED=padded,
            num_warps=8,
        )
