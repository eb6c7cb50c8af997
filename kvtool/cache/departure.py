"""Part what leaves a layer from what stays, and let the policy make something of it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtool.cache.slots import SlotLayer, take
from kvtool.policies.evicted.eviction import Departure
from kvtool.policies.evicted.merging import Merging
from kvtool.policies.numbers import SHIFT, Count, State
from kvtool.policies.parts import SlotView


@torch.no_grad()
def part_block(
    layer: SlotLayer,
    slots: tuple[Tensor, Tensor],
    view: SlotView,
    state: State,
    importance: Tensor,
    chosen: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor, Tensor, State]:
    """Copy what stays of a block and of the slots before it, changed by what leaves.

    Args:
        slots: keys and values of all, (batch, kv_heads, slots, dim).
        view, state: the same slots as the policy sees them.
        importance: (batch, kv_heads, slots) float32 by which they were chosen.
        chosen: (batch, kv_heads, kept) indices of those that stay, in ascending position.
        positions: (batch, kv_heads, kept) their positions, -1 = empty.

    Returns:
        Keys, values, positions and state of those that stay.
    """
    keys, values = (take(tensor, chosen) for tensor in slots)
    kept_state = {name: number.gather(2, chosen) for name, number in state.items()}
    on_evict = layer.policy.on_evict
    if on_evict is not None:
        split = layer.head_budgets
        least = layer.least if split is None else int(split.min())
        gone, gone_positions = _leaving(view.positions, chosen, positions, least)
        leaving = Departure(
            keys=slots[0],
            values=slots[1],
            state=state,
            gone=gone,
            gone_positions=gone_positions,
            kept_keys=keys,
            kept_values=values,
            kept_state=kept_state,
            kept_positions=positions,
            tokens_seen=view.tokens_seen,
            layer=layer.index,
            heads=layer.heads,
            whole=not layer.masked and split is None,
            importance=importance,
        )
        _hand_over(layer, leaving)
    return keys, values, positions, kept_state


def _leaving(positions: Tensor, chosen: Tensor, kept: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """Slots that are stored and not chosen, in ascending position.

    Args:
        least: the fewest slots that a row or head keeps.

    Returns:
        (batch, kv_heads, victims) indices and positions, -1 where a head loses fewer.
    """
    stays = torch.zeros_like(positions, dtype=torch.bool).scatter_(2, chosen, kept >= 0)
    last = torch.iinfo(positions.dtype).max
    key = positions.masked_fill(stays | (positions < 0), last)
    gone_positions, gone = key.sort(-1)
    victims = positions.shape[2] - min(least, chosen.shape[2])
    gone_positions = gone_positions[..., :victims]
    return gone[..., :victims], gone_positions.masked_fill(gone_positions == last, -1)


@torch.no_grad()
def part_decoded(layer: SlotLayer, tokens_seen: Count) -> None:
    """Let the policy make something of the pending victim while its key and value are there.

    Args:
        tokens_seen: tokens of each row so far.
    """
    on_evict = layer.policy.on_evict
    if on_evict is None:
        return
    if isinstance(on_evict, Merging):
        layer.own()
    used = slice(0, layer.used)
    gone = layer.pending[..., None]
    keys, values = layer.keys[:, :, used], layer.values[:, :, used]
    state = {name: number[:, :, used] for name, number in layer.state.items()}
    leaving = Departure(
        keys=keys,
        values=values,
        state=state,
        gone=gone,
        gone_positions=layer.positions.gather(2, gone),
        kept_keys=keys,
        kept_values=values,
        kept_state=state,
        kept_positions=layer.stored_positions(),
        tokens_seen=tokens_seen,
        layer=layer.index,
        heads=layer.heads,
        whole=not layer.masked,
    )
    _hand_over(layer, leaving)


def _hand_over(layer: SlotLayer, leaving: Departure) -> None:
    if layer.calibration is not None:
        layer.calibration.set_aside(leaving)
    else:
        layer.policy.on_evict.absorb(layer.memory, leaving)


def close_ranks(state: State, positions: Tensor, chosen: Tensor) -> None:
    """Let those that stay of a block move up to the places of those that leave, in place.

    Args:
        state: the numbers beside those that stay.
        positions: (batch, kv_heads, slots) of all, in ascending position, -1 = empty.
        chosen: (batch, kv_heads, kept) indices of those that stay, in ascending position.
    """
    if SHIFT in state:
        before = ((positions >= 0).cumsum(-1) - 1).gather(2, chosen)
        state[SHIFT].add_(torch.arange(chosen.shape[2], device=chosen.device) - before)


def close_rank(state: State, positions: Tensor, victim: Tensor) -> None:
    """Let the tokens behind a victim move up by one place, in place.

    Args:
        state: the numbers beside the slots.
        positions: (batch, kv_heads, slots), in any order, -1 = empty.
        victim: (batch, kv_heads) index of a slot; nothing moves where it is empty.
    """
    if SHIFT in state:
        gone = positions.gather(2, victim[..., None])
        state[SHIFT].sub_(((positions > gone) & (gone >= 0)).float())
