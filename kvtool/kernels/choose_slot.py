"""The slot that the next token takes, where a policy's choice can be said in numbers.

It is chosen while sums are counted, which `kvtool.kernels.join_parts` does. What CAOTE makes of the
sums needs all values, in a launch of its own.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtool.kernels.tiles import of_head, strided

_CHANNELS = 16  # of all slots that are read at a time


class Choice(NamedTuple):
    """How the slot that the next token takes follows from numbers.

    Attributes:
        seen: (batch or 1,) int64, tokens so far with the running one.
        score: what ranks slots: one of `COLUMNS`, or `position`.
        by_values: whether the score is weighed by the values, as CAOTE does.
        recent, first: newest and first tokens that stay.
        budget: slots that a head may keep.
    """

    seen: Tensor
    score: str
    by_values: bool
    recent: int
    first: int
    budget: int

    def numbers(self) -> tuple[Tensor | int, ...]:
        """Lay it out for a kernel."""
        stride = self.seen.stride(0) if len(self.seen) > 1 else 0
        return self.seen, stride, self.recent, self.first, self.budget


@triton.jit
def lowest_slot(score, held, there, choice, batch, PADDED: tl.constexpr):
    """Find the slot to evict, of all slots of a head, as `kvtool.maths.selection.lowest` does."""
    start = tl.load(choice[0] + batch * choice[1]).to(tl.int32) - choice[2]
    protected = (held >= start) | (held < choice[3])
    if PADDED:  # a row below its budget takes an empty slot, one above it none
        empty = held < 0
        over = tl.sum((held >= 0).to(tl.int32), 0) > choice[4]
        protected = (protected | empty) & over
        score = tl.where(empty & ~protected, float("-inf"), score)
    score = tl.where(protected | ~there, float("inf"), score)
    held = tl.where(there, tl.where(protected, -3, held), -4)
    least = score == tl.min(score, 0)
    last = tl.max(tl.where(least, held, -5), 0)
    places = tl.arange(0, score.shape[0])
    return tl.min(tl.where(least & (held == last), places, 2147483647), 0).to(tl.int64)


@triton.jit(do_not_specialize=["slots"])
def choose_by_values_kernel(
    scores,
    value,
    positions,
    next_slot,
    choice,
    heads,
    slots,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Choose the slot of one head whose loss moves the output least: `policies.rescore.caote`."""
    own = tl.program_id(0) % heads
    batch = (tl.program_id(0) // heads).to(tl.int64)
    places = tl.arange(0, SLOTS)
    there = places < slots
    held = tl.load(of_head(positions, batch, own) + places, mask=there, other=-1)
    share = tl.load(of_head(scores, batch, own) + places, mask=held >= 0, other=0.0)
    total, count = tl.sum(share, 0), tl.sum((held >= 0).to(tl.float32), 0)
    share = tl.where(held >= 0, tl.where(total > 0, share / total, 1.0 / count), 0.0)
    distance = tl.zeros((SLOTS,), tl.float32)
    for low in range(0, VALUE_DIM, CHANNELS):
        channels = low + tl.arange(0, CHANNELS)
        values = tl.load(
            of_head(value, batch, own)
            + places.to(tl.int64)[:, None] * value[3]
            + channels[None, :],
            mask=there[:, None] & (channels < VALUE_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        apart = values - tl.sum(values * share[:, None], 0)[None, :]
        distance += tl.sum(apart * apart, 1)
    score = share / tl.maximum(1 - share, 1e-6) * tl.sqrt(distance)
    score = tl.where(1 - share < 1e-6, float("inf"), score)
    slot = lowest_slot(score, held, there, choice, batch, PADDED)
    tl.store(next_slot + batch * heads + own, slot)


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
    with torch.cuda.device_of(value):
        choose_by_values_kernel[(batch * heads,)](
            *(strided(scores), strided(value), strided(positions), slot, choice.numbers()),
            heads,
            slots,
            VALUE_DIM=value_dim,
            CHANNELS=_CHANNELS,
            SLOTS=triton.next_power_of_2(slots),
            PADDED=padded,
            num_warps=8,
        )
