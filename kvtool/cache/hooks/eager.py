"""Families whose attention cannot be exchanged: their own eager one runs, and hooks watch it.

A hook before the attention module replaces the mask by one made from true positions. A hook after
it reads the weights that eager attention returns and runs the rest of the step. Weights of a prompt
exist in full while it runs, so this path does not bound the memory of prefill.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.steps.block import Block, RowWatcher, vote_weights
from kvtool.cache.steps.call import AttendedToken, take_pending
from kvtool.cache.steps.masked import as_bias, check_order, check_shape
from kvtool.cache.steps.step import end_token, run_block
from kvtool.cache.steps.view import (
    decode_needs_rows,
    decode_rows,
    last_query_columns,
    make_rows,
)
from kvtool.cache.whole.cache import KVCache
from kvtool.cache.whole.layers import why_not
from kvtool.errors import KvtoolError
from kvtool.maths.attention import visible_keys
from kvtool.policies.evidence import AttentionRows

_LOCAL = threading.local()


def install(model: PreTrainedModel) -> list:
    """Hook every attention module."""
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


def _before(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    cache = kwargs.get("layer_past")
    if not isinstance(cache, KVCache):
        return None
    layer = cache.slot_layer(module.layer_idx)
    if layer is cache.first_layer:
        refused = why_not(cache.policy, "eager", cache.config.model_type)
        if refused is not None:
            raise KvtoolError(refused)
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    batch, q_len = hidden.shape[:2]
    if cache.layer_block is not None and q_len > cache.layer_block:
        raise KvtoolError(
            f"a prompt of {q_len} tokens cannot be split inside eager attention",
            hint=f"feed it in blocks: generate(..., prefill_chunk_size={cache.settings.block})",
        )
    if layer.ragged is not None:
        raise KvtoolError(
            f"`{cache.policy}` keeps different counts in the heads of a layer, "
            f"which the model's own eager attention cannot read"
        )
    decoding = cache.decodes(layer, q_len)
    if cache.running.own_mask:
        heads = cache.config.num_attention_heads
        mask = _callers_mask(layer, kwargs["attention_mask"], hidden, heads)
        _LOCAL.masked = Masked(None, mask[:, :, None])
        return args, kwargs | {"attention_mask": mask}
    padded = _new_positions(layer, kwargs.get("attention_mask"), q_len, decoding)
    if padded is None:
        new = (_first_new(layer) + torch.arange(q_len, device=hidden.device)).expand(batch, q_len)
    else:
        new = padded
    visible = visible_keys(new, _stored_positions(layer, new, decoding))
    _LOCAL.masked = Masked(padded, visible)
    blocked = torch.finfo(hidden.dtype).min
    mask = torch.zeros_like(visible[:, :, 0], dtype=hidden.dtype)
    mask = mask.masked_fill_(~visible[:, :, 0], blocked)
    return args, kwargs | {"attention_mask": mask}


def _callers_mask(layer: SlotLayer, mask: Tensor, hidden: Tensor, heads: int) -> Tensor:
    """Check a caller's own mask, and return it as numbers to be added: eager attention does so."""
    (batch, q_len), kept = hidden.shape[:2], 0
    if layer.is_initialized and layer.slots.used:
        kept = layer.slots.kept
        check_order(layer)
    check_shape(mask, (batch, heads, q_len, kept + q_len))
    return as_bias(mask.to(hidden.device)).clamp(min=torch.finfo(hidden.dtype).min).to(hidden.dtype)


def _new_positions(
    layer: SlotLayer, mask: Tensor | None, q_len: int, decoding: bool
) -> Tensor | None:
    """Positions of the new tokens, None where no sequence is padded."""
    if mask is None or layer.seen_device is not None or (decoding and not layer.padded):
        return None
    valid = mask[:, 0, -1, -q_len:]
    valid = valid if valid.dtype == torch.bool else valid == 0
    if not layer.padded and bool(valid.all()):
        return None
    return torch.where(valid, _first_new(layer) + valid.long().cumsum(-1) - 1, -1)


def _first_new(layer: SlotLayer) -> int | Tensor:
    """Position of the first token that the layer has not taken in yet: one, or (batch or 1, 1)."""
    if layer.lengths is not None:
        return layer.lengths[:, None]
    return layer.seen if layer.seen_device is None else layer.seen_device[0] - 1


def _stored_positions(layer: SlotLayer, new: Tensor, decoding: bool) -> Tensor:
    """Positions of the keys that the module is about to attend to: (batch, kv_heads, keys)."""
    if not layer.is_initialized:
        return new[:, None]
    slots = layer.slots
    slot = slots.reuse_slot if slots.reserved is None else slots.reserved.next
    if decoding and slot is not None:
        slot = slot[..., None]
        stored = layer.stored_positions().long()
        return stored.scatter(2, slot, new[:, None].expand_as(slot))
    layer.compact()
    if slots.used == 0:
        return new[:, None]
    kept = slots.positions[:, :, : slots.used].long()
    return torch.cat([kept, new[:, None].expand(-1, kept.shape[1], -1)], 2)


def _after(module: nn.Module, args: tuple, kwargs: dict, output: tuple) -> None:
    cache = kwargs.get("layer_past")
    if not isinstance(cache, KVCache):
        return
    weights = output[1].float().unsqueeze(2)  # (batch, heads, 1, q_len, keys)
    step, masked = take_pending(weights.shape[-1]), _LOCAL.masked
    _LOCAL.masked = None
    assert step is not None, "the module has updated its cache"
    layer = step.layer
    if step.decoding:
        layer.enter_token(masked.positions)
        needed = decode_needs_rows(layer)
        rows = decode_rows(layer, weights, masked.positions) if needed else None
        token = AttendedToken(output[0], rows=rows)
        end_token(layer, token, step.raw_value, step.context.group)
        return
    cache.begin_block(layer, weights.shape[1], masked.positions, weights.shape[3])
    seen, raw = SeenBlock(weights, masked.visible, output[0]), (step.raw_key, step.raw_value)
    run_block(layer, seen, masked.positions, raw, step.raw_value, weights.shape[3])
    cache.end_block(layer)


class Masked(NamedTuple):
    """What the hook before a module has found out, for the one after it.

    Attributes:
        positions: (batch, q_len) of the new tokens, -1 = padding; None: nothing is padded.
        visible: bool (batch, kv_heads or 1, 1, q_len, keys).
    """

    positions: Tensor | None
    visible: Tensor


@dataclass(frozen=True)
class SeenBlock:
    """A block that the model's own eager attention has attended.

    Attributes:
        weights: (batch, heads, 1, q_len, keys) float32.
        visible: as of `Masked`.
        out: what the module returned.
    """

    weights: Tensor
    visible: Tensor
    out: Tensor

    def placed(self, layer: SlotLayer, block: Block) -> SeenBlock:
        """The same: such models place their keys themselves."""
        return self

    def attend(self, layer: SlotLayer, block: Block, observed: bool) -> Tensor:
        """Show all rows to whoever observes, and return what the module has returned."""
        if observed:
            watch = RowWatcher(layer, block)
            valid = block.new >= 0 if layer.padded else None
            watch.see(make_rows(layer, self.weights, self.visible[:, :, 0], valid))
            watch.end()
        return self.out

    def last_rows(self, layer: SlotLayer, block: Block) -> AttentionRows:
        """Weights of the last queries of the prompt, or the sum of their votes."""
        weights, last = self.weights, last_query_columns(layer, block.view, block.new)
        index = last[:, None, None, :, None].expand(*weights.shape[:2], 1, -1, weights.shape[-1])
        valid = (block.new >= 0).gather(1, last) if layer.padded else None
        rows = make_rows(layer, weights.gather(3, index), None, valid)
        votes = vote_weights(layer, block, last.shape[1])
        return rows if votes is None else rows.summed(votes)

    def end(self, layer: SlotLayer, block: Block) -> Block | None:
        """The block: a policy that takes note of its queries is refused before."""
        return block
