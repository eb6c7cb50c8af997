"""Attention under a mask of the caller's own, in a layer that has lost no token it would speak of.

Columns of the mask are tokens in the order in which they were read, padding included. What the
layer keeps does not depend on the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.steps.call import Call
from kvtool.errors import KvtoolError
from kvtool.maths.attention import biased_weights, group_queries, weighted_values

_ROWS = 128  # queries whose weights are held at a time


def check_mask(layer: SlotLayer, call: Call, mask: Tensor, decoding: bool) -> None:
    """Refuse a mask whose columns cannot be found among what is stored (KvtoolError)."""
    if call.context.shares_kv:
        raise KvtoolError("a 4D attention mask cannot follow a layer whose keys other layers read")
    if layer.window is None and not layer.policy.attends_all:
        raise KvtoolError(f"policy `{layer.policy}` cannot honour a mask of the model's own")
    columns = layer.slots.kept + (0 if decoding else call.q_len)
    check_shape(mask, (*call.query.shape[:3], columns))
    if columns > call.q_len:
        check_order(layer)


def check_order(layer: SlotLayer) -> None:
    """Refuse a mask over padded texts whose padding was moved (KvtoolError)."""
    if layer.padded and not (layer.slots.as_read and layer.slots.ordered):
        raise KvtoolError(
            "an attention mask over cached tokens cannot follow a padded batch that was read in "
            "blocks, joined or loaded: its padding is not where it was",
            hint="read the batch at once, with prefill full",
        )


def as_bias(mask: Tensor) -> Tensor:
    """Return the numbers that a mask adds, in float32."""
    if mask.dtype != torch.bool:
        return mask.float()
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(
        ~mask, lowest
    )


def check_shape(mask: Tensor, wanted: tuple[int, ...]) -> None:
    """Refuse another shape than (batch, heads, q_len, keys), or 1 for all but the keys."""
    fits = [have in (1, want) for have, want in zip(mask.shape[:3], wanted[:3], strict=True)]
    if not all(fits) or mask.shape[3] != wanted[3]:
        raise KvtoolError(
            f"the attention mask has shape {tuple(mask.shape)}, and these tokens need "
            f"(batch {wanted[0]} or 1, heads {wanted[1]} or 1, {wanted[2]} new tokens, "
            f"{wanted[3]} keys)"
        )


def mask_by_slot(layer: SlotLayer, mask: Tensor) -> Tensor:
    """Put the columns of a decoded token's mask in the order of the slots in use."""
    slots, columns = layer.slots, mask.shape[-1]
    if slots.ordered and slots.used == columns:
        return mask
    if layer.padded:
        column = torch.arange(slots.used, device=mask.device).expand(slots.batch, -1)
    else:
        column = slots.positions[:, 0, : slots.used].long() - (layer.seen - columns)
    outside = ((column < 0) | (column >= columns))[:, None, None]
    index = column.clamp(0, columns - 1)[:, None, None]
    index = index.expand(-1, *mask.shape[1:3], -1).to(mask.device)
    sorted_mask = mask.expand(slots.batch, -1, -1, -1).gather(-1, index)
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return sorted_mask.masked_fill(outside.to(mask.device), hidden)


def masked_attention(call: Call, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attend under a mask: (batch, heads, q_len, value_dim).

    Args:
        key, value: (batch, heads of the attention, keys, dim).
        mask: bool or float, (batch or 1, heads or 1, q_len or 1, keys).
    """
    query, heads = call.query, key.shape[1]
    mask = mask.to(query.device)
    if not call.needs_weights:
        mask = mask if mask.dtype == torch.bool else mask.to(query.dtype)
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            scale=call.scale,
            enable_gqa=query.shape[1] != heads,
        )
    # one for all heads, or one for each query head, seen by the KV head that it reads
    bias = as_bias(mask).unflatten(1, (1, 1) if mask.shape[1] == 1 else (heads, -1))
    grouped, outs = group_queries(query, heads), []
    for start in range(0, query.shape[2], _ROWS):
        rows = slice(start, start + _ROWS)
        own = bias if bias.shape[3] == 1 else bias[:, :, :, rows]
        weights = biased_weights(
            grouped[:, :, :, rows],
            key,
            own,
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        outs.append(weighted_values(weights, value))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)
