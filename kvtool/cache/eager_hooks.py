"""Families whose attention cannot be exchanged: their own eager one runs, and hooks watch it.

A hook before the attention module replaces the mask by one made from true positions, a hook after
it reads the weights that eager attention returns and runs the rest of the step. Weights of a prompt
exist in full while it runs, so this path does not bound the memory of prefill.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvtool.cache import handover
from kvtool.cache.cache import KVCache
from kvtool.cache.eviction import (
    WatchedBlock,
    block_needs_all_rows,
    block_needs_last_rows,
    decode_needs_rows,
    decode_rows,
    enter_block,
    enter_decode,
    last_queries,
    leave_block,
    leave_decode,
    make_rows,
    weigh_votes,
)
from kvtool.cache.slots import SlotLayer
from kvtool.errors import KvtoolError
from kvtool.maths.attention import visible_keys

FAMILIES = ("falcon", "gptj")


def install(model: PreTrainedModel) -> list:
    """Hook every attention module.

    Returns:
        Handles whose `remove` undoes it.
    """
    modules = [
        module
        for name, module in model.named_modules()
        if name.endswith(("self_attention", ".attn")) and hasattr(module, "layer_idx")
    ]
    return [
        hook
        for module in modules
        for hook in (
            module.register_forward_pre_hook(_before, with_kwargs=True),
            module.register_forward_hook(_after, with_kwargs=True),
        )
    ]


def _before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    cache = kwargs.get("layer_past")
    if not isinstance(cache, KVCache):
        return None
    if cache.policy.reader is not None:
        raise KvtoolError(
            f"policy `{cache.policy}` reads a part of the keys, and the own attention of "
            f"`{cache.config.model_type}` always reads all"
        )
    cache.hooked = True
    layer: SlotLayer = cache.layers[module.layer_idx]
    if layer.calibration is not None:
        raise KvtoolError(
            f"`{layer.policy.on_evict.name}` compares queries, "
            f"and the eager attention of `{cache.config.model_type}` does not show them"
        )
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    batch, q_len = hidden.shape[:2]
    if cache.layer_block is not None and q_len > cache.layer_block:
        raise KvtoolError(
            f"a prompt of {q_len} tokens cannot be split inside eager attention",
            hint=f"feed it in blocks: generate(..., prefill_chunk_size={cache.block})",
        )
    if layer.lanes is not None:
        raise KvtoolError(
            f"`{cache.policy}` keeps different counts in the heads of a layer, "
            f"which the model's own eager attention cannot read"
        )
    decoding = cache.decodes(layer, q_len)
    padded = _new_positions(layer, kwargs.get("attention_mask"), q_len, decoding)
    new = padded
    if padded is None:
        new = (_first_new(layer) + torch.arange(q_len, device=hidden.device)).expand(batch, q_len)
    visible = visible_keys(new, _stored_positions(layer, new, decoding))
    cache.hook_note = (padded, visible)
    blocked = torch.finfo(hidden.dtype).min
    mask = torch.zeros_like(visible[:, :, 0], dtype=hidden.dtype)
    mask = mask.masked_fill_(~visible[:, :, 0], blocked)
    return args, kwargs | {"attention_mask": mask}


def _new_positions(
    layer: SlotLayer, mask: Tensor | None, q_len: int, decoding: bool
) -> Tensor | None:
    """Positions of the new tokens, None where no row is padded.

    They follow from the model's own mask: its last query sees every new token that is not padding.
    In a static step no row is padded, and the mask says nothing.
    """
    if mask is None or layer.clock is not None or (decoding and not layer.ragged):
        return None
    valid = mask[:, 0, -1, -q_len:]
    valid = valid if valid.dtype == torch.bool else valid == 0
    if not layer.ragged and bool(valid.all()):
        return None
    return torch.where(valid, _first_new(layer) + valid.long().cumsum(-1) - 1, -1)


def _first_new(layer: SlotLayer) -> int | Tensor:
    """Position of the first token that the layer has not taken in yet: one, or (rows or 1, 1)."""
    if layer.ragged:
        return layer.lengths[:, None]
    return layer.seen if layer.clock is None else layer.clock[0] - 1


def _stored_positions(layer: SlotLayer, new: Tensor, decoding: bool) -> Tensor:
    """Positions of the keys that the module is about to attend to: (batch, kv_heads, keys)."""
    slot = layer.pending if layer.next is None else layer.next
    if decoding and slot is not None:
        slot = slot[..., None]
        stored = layer.stored_positions().long()
        return stored.scatter(2, slot, new[:, None].expand_as(slot))
    layer.settle()
    if layer.used == 0:
        return new[:, None]
    kept = layer.positions[:, :, : layer.used].long()
    return torch.cat([kept, new[:, None].expand(-1, kept.shape[1], -1)], 2)


def _after(module: nn.Module, args: tuple, kwargs: dict, output: tuple) -> None:
    cache = kwargs.get("layer_past")
    if not isinstance(cache, KVCache):
        return
    weights = output[1].float().unsqueeze(2)  # (batch, heads, 1, q_len, keys)
    taken = handover.pick_up(weights.shape[-1])
    positions, visible = cache.hook_note
    cache.hook_note = None
    layer = taken.layer
    if taken.decoding:
        enter_decode(layer, positions)
        rows = decode_rows(layer, weights, positions) if decode_needs_rows(layer) else None
        leave_decode(layer, taken.raw_value, rows)
        return
    q_len = weights.shape[3]
    cache.set_budget(layer, positions, q_len)
    block = enter_block(layer, q_len, positions, taken.raw_key, taken.raw_value)
    valid = block.new >= 0 if layer.ragged else None
    if block_needs_all_rows(layer):
        watch = WatchedBlock(layer, block)
        watch.see(make_rows(layer, weights, visible[:, :, 0], valid))
        watch.end()
    rows = None
    if block_needs_last_rows(layer, block):
        last = last_queries(layer, block.new)
        index = last[:, None, None, :, None].expand(
            weights.shape[0], weights.shape[1], 1, -1, weights.shape[-1]
        )
        valid = None if valid is None else valid.gather(1, last)
        rows = make_rows(layer, weights.gather(3, index), None, valid)
        votes = weigh_votes(layer, block, last.shape[1])
        rows = rows if votes is None else rows.summed(votes)
    leave_block(layer, block, taken.raw_key, taken.raw_value, rows)
    cache.layer_done(layer)
