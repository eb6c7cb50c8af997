"""Attention of a decoded token over slots that hold codes: slice by slice, never all in float.

Where vectors are rotated before they are rounded, the query is rotated in place of the keys, and
the output is rotated back once. With `positions=cache` keys are rotated back instead, since they
are turned to their places by a rotation of another kind.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvtool.cache.steps.call import AttendedToken, Call
from kvtool.cache.steps.rope_shift import shift_keys
from kvtool.cache.steps.view import decode_rows
from kvtool.cache.storage.layer import SlotLayer
from kvtool.cache.storage.rope_shift import RopeShift
from kvtool.cache.storage.slot_form import SLICE, CodedForm, Stored
from kvtool.maths.attention import (
    dot_products,
    group_queries,
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
    """Attend the slots in use by a token that stands among them.

    Args:
        layer: whose slots hold codes.
        call: of the decoded token; its keys and values are not looked at.
        stored: what the slots in use hold.
        visible: as for `attention_weights`.
        observed: whether the policy wants the weights.
        needs_lse: whether the log-sum-exp is needed.
    """
    form = layer.slots.form
    if not isinstance(form, CodedForm):
        raise RuntimeError("the slots of this layer hold no codes")
    products, sinks, lse = _products(layer, form, call, stored), call.sinks, None
    if sinks is not None and sinks.dim() == 1:
        sinks = sinks.view(products.shape[1], -1)
    how = call.scale, visible, call.softcap, sinks
    if needs_lse:
        weights, lse = weights_lse_of_products(products, *how)
    else:
        weights = weights_of_products(products, *how)
    rows = decode_rows(layer, weights, call.positions) if observed else None
    return AttendedToken(_outputs(form, stored, weights).to(call.query.dtype), lse, rows)


def _products(layer: SlotLayer, form: CodedForm, call: Call, stored: Stored) -> Tensor:
    """Dot products of the query and all keys: (batch, kv_heads, group, 1, slots) float32."""
    shift = RopeShift.of(layer) if layer.parts else None
    moved = shift is not None and shift.rotation is not None
    grouped, constant = group_queries(call.query.float(), layer.slots.kv_heads), None
    parts = []
    if not moved:
        grouped, constant = form.rotated_query(grouped)
    for own, part in _slices(stored):
        if moved:
            keys = shift_keys(layer, form.dequantise_keys(part), own).float()
        else:
            keys = form.rounded_keys(part)
        parts.append(dot_products(grouped, keys))
    products = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return products if constant is None else products + constant


def _outputs(form: CodedForm, stored: Stored, weights: Tensor) -> Tensor:
    """Average all values under the weights: (batch, heads, 1, value_dim) float32."""
    flat, total = weights.flatten(2, 3), None
    for own, part in _slices(stored):
        means = torch.matmul(flat[..., own], form.rounded_values(part))
        total = means if total is None else total + means
    if total is None:
        raise RuntimeError("a decoded token has nothing to attend to, not even itself")
    rotation = form.rotations[1]
    return (total if rotation is None else rotation.rotate_back(total)).flatten(1, 2)[:, :, None]


def _slices(stored: Stored) -> Iterator[tuple[slice, Stored]]:
    """Slices of the slots, in order, and what they hold.

    All slots at once while a step is compiled: a graph must not depend on how many slices there
    are.
    """
    if torch.compiler.is_compiling():
        yield slice(None), stored
        return
    used = stored["keys"].shape[2]
    for start in range(0, used, SLICE):
        own = slice(start, min(start + SLICE, used))
        yield own, {name: tensor[:, :, own] for name, tensor in stored.items()}
