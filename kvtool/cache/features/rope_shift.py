"""Rotate keys and queries from where the model placed them to their places among kept tokens.

With `positions=cache` a token is at its rank among the tokens that its KV head keeps, in order of
true position, as StreamingLLM has it (https://arxiv.org/abs/2309.17453, section 3.2). A stored key
is never changed. Beside it is its shift, the rank minus the position for which the model has
rotated it. Each step rotates copies, so that nothing adds up.

Angles lose their precision at large positions (0.06 rad at a million in float32). So the model gets
position ids that number new tokens on from those in the cache, whatever the caller passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import Lanes, LayerSite, Part
from kvtool.cache.steps.block import Block
from kvtool.cache.steps.call import Call, Placement
from kvtool.errors import KvtoolError
from kvtool.maths.rotation import Rotation
from kvtool.policies.numbers import SHIFT, Count, State


class RopeShift(Part):
    """The rotation of a layer's keys; None: they do not depend on the position."""

    name = "rope_shift"
    refusals: Mapping[str, str] = {"latents": "positions=cache", "shared": "places tokens anew"}

    def __init__(self, rotation: Rotation | None) -> None:
        self.rotation = rotation
        if rotation is None:  # so nothing is placed
            self.refusals = {"shared": self.refusals["shared"]}

    @classmethod
    def make(cls, site: LayerSite) -> RopeShift | None:
        return cls(site.rotation) if site.policy.score.positions == "cache" else None

    def for_heads(self, lanes: Lanes) -> RopeShift:
        return RopeShift(self.rotation)

    @torch.no_grad()
    def place(self, layer: SlotLayer, call: Call, block: Block | None) -> Call:
        if self.rotation is None:
            return call
        if block is None:
            return self._place_token(self.rotation, layer, call)
        return self._place_block(self.rotation, layer, call, block)

    def _place_block(self, rotation: Rotation, layer: SlotLayer, call: Call, block: Block) -> Call:
        """Bring the kept slots and a block behind them to their ranks."""
        kept = block.kept
        held: Count = kept
        if kept and layer.padded:
            held = (block.view.positions[:, :, :kept] >= 0).sum(-1, keepdim=True)
        shifts, new_shift = block.state[SHIFT], _new_shift(call, held)
        old, new, query = call.key[:, :, :kept], call.key[:, :, kept:], call.query
        if new_shift is not None:
            shifts[:, :, kept:] = new_shift
            new = rotation.shift(new, shifts[:, :, kept:])
            query = rotation.shift(query, _by_query(new_shift, query))
        if kept:
            old = rotation.shift(old, shifts[:, :, :kept])
            new = torch.cat([old, new], 2)
        return replace(call, key=new, query=query)

    def _place_token(self, rotation: Rotation, layer: SlotLayer, call: Call) -> Call:
        """Bring the slots and the query of a decoded token, which is among them, to their ranks."""
        slots = layer.slots
        held: Count = slots.used - 1
        if layer.padded:
            held = (slots.positions[:, :, : slots.used] >= 0).sum(-1, keepdim=True) - 1
        shifts, new_shift = slots.state[SHIFT][:, :, : slots.used], _new_shift(call, held)
        query = call.query
        if new_shift is not None:
            if slots.written is None:
                shifts[:, :, -1:] = new_shift
            else:
                shifts.scatter_(2, slots.written, new_shift.expand_as(slots.written))
            query = rotation.shift(query, _by_query(new_shift, query))

        def place(keys: Tensor, own: slice) -> Tensor:
            return rotation.shift(keys, shifts[:, :, own])

        if layer.attends_codes:
            return replace(call, query=query, place_keys=place)
        return replace(call, query=query, key=place(call.key, slice(None)))

    def slot_left(self, state: State, positions: Tensor, evicted: Tensor) -> None:
        """Let the tokens behind an evicted one move up by one place."""
        left = positions.gather(2, evicted[..., None])
        state[SHIFT].sub_(((positions > left) & (left >= 0)).float())

    def slots_left(self, state: State, positions: Tensor, chosen: Tensor) -> None:
        """Let those that stay of a block move up to the places of those that leave."""
        before = ((positions >= 0).cumsum(-1) - 1).gather(2, chosen)
        state[SHIFT].add_(torch.arange(chosen.shape[2], device=chosen.device) - before)


def place_forward(first: SlotLayer, given: Mapping[str, Any]) -> tuple[Placement, Tensor]:
    """Number the tokens of a forward, of arguments `given`, on from those in the first layer.

    Returns:
        Where they are, and position ids for the model, (batch, q_len).
    """
    tokens = given.get("input_ids")
    if tokens is None:
        tokens = given["inputs_embeds"]
    batch, q_len = tokens.shape[:2]
    placement = _behind_kept(first, q_len)
    mask = given.get("attention_mask")
    return placement, _position_ids(placement, batch, q_len, mask, tokens.device)


def _behind_kept(first: SlotLayer, q_len: int) -> Placement:
    """Place the new tokens of each entry behind the longest of its heads, in the first layer."""
    seen = first.seen if first.seen_device is None else None
    if seen == 0:
        return Placement(seen, 0, q_len)
    if not first.padded and first.ragged is None:
        kept = first.slots.kept
        return Placement(seen, kept, kept + q_len)
    stored = first.stored_positions()
    return Placement(seen, (stored >= 0).sum(-1).amax(1), stored.shape[2] + q_len)


def _position_ids(
    placement: Placement, batch: int, q_len: int, mask: object, device: torch.device
) -> Tensor:
    """Position ids of the new tokens, counted without padding: (batch, q_len) int64."""
    start = placement.start
    if isinstance(start, Tensor):
        start = start.to(device)[:, None]
    if mask is None:
        return (start + torch.arange(q_len, device=device)).expand(batch, -1)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise KvtoolError("positions=cache needs an attention mask of two dimensions, or none")
    valid = mask[:, -q_len:].to(device).bool()
    return (start + valid.long().cumsum(1) - 1).clamp(min=0)


def _new_shift(call: Call, held: Count) -> Tensor | None:
    """How far the new tokens still have to be shifted; None: not at all."""
    placement = call.context.placement
    assert placement is not None, "a forward places its tokens"
    start = placement.start
    if isinstance(start, Tensor):
        start = start.view(-1, 1, 1)
    shift = held - start
    if isinstance(shift, Tensor):
        return shift.float()
    return (
        None
        if shift == 0
        else torch.full((1, 1, 1), float(shift), dtype=torch.float32, device=call.query.device)
    )


def _by_query(shift: Tensor, query: Tensor) -> Tensor:
    """Shifts of the queries, the same for a KV head's group: (.., heads or 1, q_len)."""
    batch, heads, q_len, _ = query.shape
    if shift.shape[1] > 1:
        shift = shift.repeat_interleave(heads // shift.shape[1], 1)
    return shift.expand(batch, -1, q_len)
