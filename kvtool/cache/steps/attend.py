"""Attention of a decoded token over the slots in use."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from kvtool.cache.steps.attend_codes import attend_codes
from kvtool.cache.steps.attend_triton import can_count, can_count_codes, count_slots
from kvtool.cache.steps.call import AttendedToken, Call
from kvtool.cache.steps.rope_shift import shift_decoded, shift_query
from kvtool.cache.steps.shared_kv import SharedKV, share_kv
from kvtool.cache.steps.view import decode_needs_rows, decode_rows
from kvtool.cache.storage.due import CutSchedule
from kvtool.cache.storage.layer import SlotLayer
from kvtool.cache.storage.slot_form import Stored
from kvtool.kernels.kind import Family
from kvtool.maths.attention import (
    attention_weights,
    attention_weights_lse,
    dot_products,
    group_queries,
    weighted_values,
    weights_lse_of_products,
    weights_of_products,
)
from kvtool.maths.fused import can_fuse, fused_group_attention

TRITON_DEVICES = frozenset({"cuda"})


def attend_token(layer: SlotLayer, call: Call, needs_lse: bool) -> AttendedToken:
    """Attend the slots in use by a token that stands among them, by the kernel that fits."""
    codes = layer.attends_codes
    if layer.policy.score.positions == "cache":
        call = shift_query(layer, call) if codes else shift_decoded(layer, call)
    visible = visible_slots(layer)
    stored = layer.slots.used_stored() if codes else None
    if call.context.shares_kv:
        _lend_slots(layer, call, visible, stored)
    observed = layer.policy.needs_all_rows or decode_needs_rows(layer)
    counts = call.query.device.type in TRITON_DEVICES and not needs_lse
    if stored is not None:
        if counts and can_count_codes(layer, call):
            return count_slots(layer, call)
        return attend_codes(layer, call, stored, visible, observed=observed, needs_lse=needs_lse)
    weighed = observed or call.needs_weights
    if not (weighed or needs_lse):
        explicit = layer.seen_device is not None and call.query.is_cpu
        return AttendedToken(attend_unseen(call, visible, explicit=explicit))
    if counts and can_count(layer, call, Family.SLOTS):
        return count_slots(layer, call)
    if not weighed and visible is None and can_fuse(call.query, call.key, call.value):
        return _attend_fused(call)
    return _attend_weighed(layer, call, visible, observed=observed, needs_lse=needs_lse)


def _lend_slots(
    layer: SlotLayer, call: Call, visible: Tensor | None, stored: Stored | None
) -> None:
    """Keep what a decoded token attends to for the layers that read it as well."""
    if CutSchedule.of(layer) is not None:
        layer.slots.share()  # a cut comes before the others have read, and must not write here
    share_kv(SharedKV(layer, call.key, call.context, visible=visible, stored=stored))


def _attend_fused(call: Call) -> AttendedToken:
    """Attend by the fused kernel of a CPU, which tells the log-sum-exp."""
    grouped = group_queries(call.query, call.key.shape[1])
    out, lse = fused_group_attention(grouped, call.key, call.value, call.scale)
    return AttendedToken(out.flatten(1, 2), lse)


def _attend_weighed(
    layer: SlotLayer, call: Call, visible: Tensor | None, *, observed: bool, needs_lse: bool
) -> AttendedToken:
    """Attend by weights in full, which the policy sees if it observes."""
    batch, heads = call.key.shape[:2]
    grouped, lse = call.query.view(batch, heads, -1, 1, call.query.shape[-1]), None
    sinks = None if call.sinks is None else _grouped_sinks(call.sinks, heads)
    products = dot_products(grouped, call.key)
    if needs_lse:
        weights, lse = weights_lse_of_products(products, call.scale, visible, call.softcap, sinks)
    else:
        weights = weights_of_products(products, call.scale, visible, call.softcap, sinks)
    rows = decode_rows(layer, weights, call.positions) if observed else None
    return AttendedToken(weighted_values(weights, call.value), lse, rows)


def visible_slots(layer: SlotLayer) -> Tensor | None:
    """Mark the slots that a decoded token may see: bool (batch, kv_heads, 1, 1, slots).

    Returns:
        None where it may see all.
    """
    positions = layer.slots.positions[:, :, : layer.slots.used]
    if layer.chunked and layer.window is not None:
        newest = layer.tokens_seen - 1
        visible = positions >= newest - newest % layer.window
    elif layer.lengths is not None or layer.slots.reserved is not None:
        visible = positions >= 0
    else:
        return None
    return visible[:, :, None, None]


def attend_unseen(call: Call, visible: Tensor | None, *, explicit: bool) -> Tensor:
    """Attend by a decoded token whose weights nobody wants: (batch, heads, 1, value_dim).

    Args:
        explicit: whether to write the weights down all the same. A compiled step on a CPU does: it
            makes one kernel of mask and softmax, and the fused kernel wants a mask of floats.
    """
    if explicit:
        weights = call_weights(call, call.query, call.key, visible)
        return weighted_values(weights, call.value)
    mask = None if visible is None else visible[:, :, 0]
    return packed_attention(call.query, call.key, call.value, mask, call.scale)


def call_weights(call: Call, query: Tensor, key: Tensor, visible: Tensor | None) -> Tensor:
    """Weights by the heads of the attention: (batch, heads, group, rows, keys) float32."""
    heads = key.shape[1]
    return attention_weights(
        group_queries(query, heads),
        key,
        scale=call.scale,
        visible=visible,
        softcap=call.softcap,
        sinks=None if call.sinks is None else _grouped_sinks(call.sinks, heads),
    )


def call_weights_lse(
    call: Call, query: Tensor, key: Tensor, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same weights, and their log-sum-exp, (batch, heads, group, rows)."""
    heads = key.shape[1]
    return attention_weights_lse(
        group_queries(query, heads),
        key,
        scale=call.scale,
        visible=visible,
        softcap=call.softcap,
        sinks=None if call.sinks is None else _grouped_sinks(call.sinks, heads),
    )


def _grouped_sinks(sinks: Tensor, heads: int) -> Tensor:
    return sinks.view(heads, -1) if sinks.dim() == 1 else sinks


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attention of one query per row; the queries of a group are packed, keys not repeated."""
    grouped = group_queries(query, key.shape[1])[:, :, :, 0]
    if mask is not None:
        mask = mask.expand(-1, key.shape[1], grouped.shape[2], -1)
    out = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    return out.flatten(1, 2)[:, :, None]
