"""Attention of a decoded token over the slots in use, exact or quantised.

Slots that hold codes are dequantised slice by slice, never all in float. Where vectors are rotated
before they are rounded, the query is rotated in place of the keys, and the output is rotated back
once. Keys that are placed anew are rotated back instead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import CutSchedule
from kvtool.cache.slots.slot_form import SLICE, CodedForm, Stored
from kvtool.cache.steps.attend_triton import (
    can_count,
    can_count_codes,
    count_slots,
    may_attend,
    write_and_attend,
)
from kvtool.cache.steps.block import Block
from kvtool.cache.steps.call import AttendedToken, Call, StepContext
from kvtool.cache.steps.view import decode_needs_rows, decode_rows
from kvtool.kernels.checks import Family
from kvtool.maths.attention import (
    attention_weights,
    attention_weights_lse,
    can_fuse,
    dot_products,
    fused_group_attention,
    group_queries,
    weighted_values,
    weights_lse_of_products,
    weights_of_products,
)


def attend_codes(
    layer: SlotLayer,
    call: Call,
    stored: Stored,
    visible: Tensor | None,
    *,
    observed: bool = False,
    needs_lse: bool = False,
) -> AttendedToken:
    """Attend the codes in the slots in use by a token that is among them.

    Args:
        stored: what the slots in use hold.
        visible: as for `attention_weights`.
        observed: whether the policy wants the weights.
    """
    form = layer.slots.form
    assert isinstance(form, CodedForm), "these slots hold codes"
    products, lse = _products(layer, form, call, stored), None
    how = call.scale, visible, call.softcap, call.sinks
    if needs_lse:
        weights, lse = weights_lse_of_products(products, *how)
    else:
        weights = weights_of_products(products, *how)
    rows = decode_rows(layer, weights, call.positions) if observed else None
    return AttendedToken(_outputs(form, stored, weights).to(call.query.dtype), lse, rows)


def _products(layer: SlotLayer, form: CodedForm, call: Call, stored: Stored) -> Tensor:
    """Dot products of the query and all keys: (batch, kv_heads, group, 1, slots) float32."""
    grouped, constant = group_queries(call.query.float(), layer.slots.kv_heads), None
    parts = []
    if call.place_keys is None:
        grouped, constant = form.rotated_query(grouped)
    for own, part in _slices(stored):
        if call.place_keys is None:
            keys = form.rounded_keys(part)
        else:
            keys = call.place_keys(form.dequantise_keys(part), own).float()
        parts.append(dot_products(grouped, keys))
    products = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    if constant is None:
        return products
    apart, centred = form.apart(stored), products + constant
    return centred if apart is None else torch.where(apart.mT[:, :, None], products, centred)


def _outputs(form: CodedForm, stored: Stored, weights: Tensor) -> Tensor:
    """Average all values under the weights: (batch, heads, 1, value_dim) float32."""
    flat, total = weights.flatten(2, 3), None
    for own, part in _slices(stored):
        means = torch.matmul(flat[..., own], form.rounded_values(part))
        total = means if total is None else total + means
    assert total is not None, "a decoded token attends to itself"
    rotation = form.rotations[1]
    return (total if rotation is None else rotation.rotate_back(total)).flatten(1, 2)[:, :, None]


def _slices(stored: Stored) -> Iterator[tuple[slice, Stored]]:
    """Slices of the slots, in order, and what they hold."""
    if torch.compiler.is_compiling():
        yield slice(None), stored
        return
    used = stored["keys"].shape[2]
    for start in range(0, used, SLICE):
        own = slice(start, min(start + SLICE, used))
        yield own, {name: tensor[:, :, own] for name, tensor in stored.items()}


TRITON_DEVICES = frozenset({"cuda"})


def note_kernel(layer: SlotLayer, call: Call) -> None:
    """Find out, before a step is compiled, whether a kernel may attend a layer's decoded tokens."""
    compiling = torch.compiler.is_compiling()
    if call.query.device.type in TRITON_DEVICES and not (compiling or call.query.requires_grad):
        layer.parts.allow_kernel(may_attend(layer, call))


def attend_token(layer: SlotLayer, call: Call, needs_lse: bool) -> AttendedToken:
    """Attend the slots in use by a token that is among them, by the kernel that fits."""
    if layer.unattended:
        if not needs_lse:
            token = write_and_attend(layer, call)
            if call.context.shares_kv:
                _lend_slots(layer, call, visible_slots(layer), None)
            return token
        layer.write_unwritten()
    codes = layer.attends_codes
    for part in layer.parts.at["place"]:
        call = part.place(layer, call, None)
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
    """Attend by the fused kernel of a CPU, which returns the log-sum-exp."""
    grouped = group_queries(call.query, call.key.shape[1])
    out, lse = fused_group_attention(grouped, call.key, call.value, call.scale)
    return AttendedToken(out.flatten(1, 2), lse)


def _attend_weighed(
    layer: SlotLayer, call: Call, visible: Tensor | None, *, observed: bool, needs_lse: bool
) -> AttendedToken:
    """Attend by weights in full, which the policy sees if it observes."""
    batch, heads = call.key.shape[:2]
    grouped, lse = call.query.view(batch, heads, -1, 1, call.query.shape[-1]), None
    products, how = dot_products(grouped, call.key), (call.scale, visible, call.softcap, call.sinks)
    if needs_lse:
        weights, lse = weights_lse_of_products(products, *how)
    else:
        weights = weights_of_products(products, *how)
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
    """Attend by a decoded token whose weights are not asked for: (batch, heads, 1, value_dim).

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
    grouped = group_queries(query, key.shape[1])
    return attention_weights(
        grouped, key, scale=call.scale, visible=visible, softcap=call.softcap, sinks=call.sinks
    )


def call_weights_lse(
    call: Call, query: Tensor, key: Tensor, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same weights, and their log-sum-exp, (batch, heads, group, rows)."""
    grouped = group_queries(query, key.shape[1])
    return attention_weights_lse(
        grouped, key, scale=call.scale, visible=visible, softcap=call.softcap, sinks=call.sinks
    )


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attention of one query per sequence; the queries of a group are packed, keys not repeated."""
    grouped = group_queries(query, key.shape[1])[:, :, :, 0]
    if mask is not None:
        mask = mask.expand(-1, key.shape[1], grouped.shape[2], -1)
    out = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    return out.flatten(1, 2)[:, :, None]


_LOCAL = threading.local()


@dataclass(frozen=True)
class SharedKV:
    """Keys and values of a layer that others read.

    Attributes:
        layer: the one that owns them.
        key: (batch, kv_heads, kept + q_len, head_dim), as the owning layer attends them.
        context: what the forward is like for it.
        block: of a prompt; None: a token is decoded.
        visible: of a decoded token, as for `attention_weights`; None: all keys.
        stored: what the slots in use hold, where a decoded token attends to codes.
    """

    layer: SlotLayer
    key: Tensor
    context: StepContext
    block: Block | None = None
    visible: Tensor | None = None
    stored: Stored | None = None


def share_kv(shared: SharedKV) -> None:
    """Keep what a layer attends to, until the forward of this thread has ended."""
    _all()[shared.layer.index] = shared


def find_shared_kv(key: Tensor) -> SharedKV | None:
    """Return what is shared together with these keys, None where they are not shared."""
    return next((shared for shared in _all().values() if shared.key is key), None)


def any_shared_kv() -> bool:
    """Say whether the running forward of this thread shares anything."""
    return bool(_all())


def forget_shared_kv() -> None:
    """Drop what the forward of this thread has shared."""
    _LOCAL.shared = {}


def _all() -> dict[int, SharedKV]:
    found: dict[int, SharedKV] | None = getattr(_LOCAL, "shared", None)
    if found is None:
        found = _LOCAL.shared = {}
    return found
