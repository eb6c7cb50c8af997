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
        recent: newest tokens that stay; -1: half of the budget.
        first: first tokens that stay.
        rescore: `caote`, `fastcaote` or nothing.
        budget: slots that a head may keep, or (batch,) int64 of each entry.
        seen: (batch or 1,) int64, tokens so far with the running one.
    """

    score: str
    recent: int
    first: int
    rescore: str
    budget: int | Tensor
    seen: Tensor


@triton.jit
def lowest_slot(
    score, held, places, there, seen, recent, first, over, best, newest, slot, PADDED: tl.constexpr
):
    """Find the slot to evict, of a tile and the best before, as `kvtool.maths.selection.lowest`."""
    protected = (held >= seen - recent) | (held < first)
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
    newest = tl.where(better, last, newest)
    return best, newest, tl.where(better, found, slot)


@triton.jit
def limits(budgets, batch, budget, recent, BUDGETS: tl.constexpr):
    """Find what an entry may keep, and its recent window: half of that where none is given."""
    if BUDGETS:
        budget = tl.load(budgets + batch).to(tl.int32)
    return budget, tl.where(recent < 0, budget // 2, recent)


@triton.jit
def count_held(positions, slots, KEYS: tl.constexpr):
    """Count the slots that are not empty."""
    held = tl.zeros((KEYS,), tl.int32)
    for low in range(0, slots, KEYS):
        places = low + tl.arange(0, KEYS)
        held += (tl.load(positions + places, mask=places < slots, other=-1) >= 0).to(tl.int32)
    return tl.sum(held, 0)


@triton.jit(do_not_specialize=["slots", "recent", "first", "budget"])
def choose_by_values_kernel(
    scores,
    value,
    positions,
    next_slot,
    tokens_seen,
    budgets,
    sums_batch,
    sums_head,
    value_batch,
    value_head,
    value_row,
    stored_batch,
    stored_head,
    seen_batch,
    heads,
    slots,
    recent,
    first,
    budget,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    EQUAL: tl.constexpr,
    PADDED: tl.constexpr,
    BUDGETS: tl.constexpr,
):
    """Choose the slot of one head whose loss moves the output least: `rescore.caote`."""
    own = (tl.program_id(0) % heads).to(tl.int64)
    batch = (tl.program_id(0) // heads).to(tl.int64)
    scores += batch * sums_batch + own * sums_head
    value += batch * value_batch + own * value_head
    positions += batch * stored_batch + own * stored_head
    budget, recent = limits(budgets, batch, budget, recent, BUDGETS)
    tokens = tl.load(tokens_seen + batch * seen_batch).to(tl.int32)
    stored_slots = slots
    if PADDED:
        stored_slots = count_held(positions, slots, KEYS)
    over = stored_slots > budget

    sums = tl.zeros((KEYS,), tl.float32)
    for low in range(0, slots, KEYS):
        places = low + tl.arange(0, KEYS)
        held = tl.load(positions + places, mask=places < slots, other=-1)
        sums += tl.load(scores + places, mask=held >= 0, other=0.0)
    total = tl.sum(sums, 0)
    equal = 1.0 / stored_slots
    mean = tl.zeros((VALUE_WIDTH,), tl.float32)
    for low in range(0, slots, KEYS):
        places = low + tl.arange(0, KEYS)
        held = tl.load(positions + places, mask=places < slots, other=-1)
        share = tl.full((KEYS,), equal, tl.float32)
        if not EQUAL:
            share = tl.load(scores + places, mask=held >= 0, other=0.0)
            share = tl.where(total > 0, share / total, equal)
        share = tl.where(held >= 0, share, 0.0)
        values = load_tile(value, places, value_row, slots, VALUE_DIM, VALUE_WIDTH)
        mean += tl.sum(values.to(tl.float32) * share[:, None], 0)
    best = tl.full((), float("inf"), tl.float32)
    newest = tl.full((), -6, tl.int32)
    slot = tl.full((), 0, tl.int32)
    for low in range(0, slots, KEYS):
        places = low + tl.arange(0, KEYS)
        held = tl.load(positions + places, mask=places < slots, other=-1)
        share = tl.load(scores + places, mask=held >= 0, other=0.0)
        share = tl.where(held >= 0, tl.where(total > 0, share / total, equal), 0.0)
        values = load_tile(value, places, value_row, slots, VALUE_DIM, VALUE_WIDTH)
        apart = values.to(tl.float32) - mean[None, :]
        score = share / (1 - share) * tl.sqrt(tl.sum(apart * apart, 1))
        score = tl.where(1 - share < 1e-6, float("inf"), score)
        best, newest, slot = lowest_slot(
            score,
            held,
            places,
            places < slots,
            tokens,
            recent,
            first,
            over,
            best,
            newest,
            slot,
            PADDED,
        )
    tl.store(next_slot + batch * heads + own, slot.to(tl.int64))


def numbers_of(choice: Choice | None, unused: Tensor) -> tuple[Tensor, Tensor, int, int, int, int]:
    """Lay out a choice for a kernel: tokens seen, budgets, the stride of the first, and counts."""
    if choice is None:
        return unused, unused, 0, 0, 0, 0
    if isinstance(choice.budget, Tensor):
        budget, budgets = 0, choice.budget
    else:
        budget, budgets = choice.budget, unused
    stride = choice.seen.stride(0) if len(choice.seen) > 1 else 0
    return choice.seen, budgets, stride, choice.recent, choice.first, budget


def choose_by_values(
    scores: Tensor, value: Tensor, positions: Tensor, slot: Tensor, choice: Choice, *, padded: bool
) -> None:
    """Choose the slot of each head whose loss moves the output least, and write it to `slot`.

    Args:
        scores: (batch, kv_heads, slots) float32, of which the shares are made.
        value: (batch, kv_heads, slots, value_dim).
        positions: (batch, kv_heads, slots) int32.
        padded: whether batch entries hold different counts.
    """
    batch, heads, slots, value_dim = value.shape
    tokens, budgets, seen_batch, *numbers = numbers_of(choice, value)
    with torch.cuda.device_of(value):
        choose_by_values_kernel[(batch * heads,)](
            scores,
            value,
            positions,
            slot,
            tokens,
            budgets,
            *scores.stride()[:2],
            *value.stride()[:3],
            *positions.stride()[:2],
            seen_batch,
            heads,
            slots,
            *numbers,
            VALUE_DIM=value_dim,
            VALUE_WIDTH=width(value_dim),
            KEYS=_VALUES // width(value_dim),
            EQUAL=choice.rescore == "fastcaote",
            PADDED=padded,
            BUDGETS=isinstance(choice.budget, Tensor),
            num_warps=8,
        )
