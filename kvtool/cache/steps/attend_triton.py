"""Attention that counts for the policy as it runs, by `kvtool.kernels`: no weights are written.

What it computes is what `explicit_block`, or explicit weights of a decoded token, and the policy's
`observe` compute.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.slot_form import CodedForm
from kvtool.cache.steps.block import Block
from kvtool.cache.steps.call import AttendedToken, Call
from kvtool.cache.steps.evict import choice_in_numbers
from kvtool.cache.steps.view import decode_needs_rows, used_state
from kvtool.kernels import trust
from kvtool.kernels.checks import CODES, Family
from kvtool.maths.attention import group_queries
from kvtool.policies.evidence import AttentionRows
from kvtool.policies.parts import Evidence


def can_count(layer: SlotLayer, call: Call, family: Family) -> bool:
    """Whether kernels can run the call, and the policy needs no more than they can return."""
    return not layer.policy.observes_rows and can_run(call, family, layer.window)


def can_run(
    call: Call,
    family: Family,
    window: int | None = None,
    *,
    value_dim: int | None = None,
    operator: bool = False,
) -> bool:
    """Whether kernels can run the call: a block (`ROWS`) or a decoded token.

    `eager` asks for plain torch, unless transformers has nothing else for the model's attention.

    Args:
        value_dim: of a value, where the call has its codes.
        operator: whether the kernels are asked as an operator of torch in a compiled step.
    """
    plain_asked = call.context.kernel == "eager" and call.softcap is call.sinks is None
    return not plain_asked and trust.usable(
        family,
        call.query,
        group=call.query.shape[1] // call.key.shape[1],
        value_dim=value_dim or call.value.shape[-1],
        softcap=call.softcap is not None,
        sinks=call.sinks is not None,
        window=window is not None and family is Family.ROWS,
        operator=operator,
    )


def can_count_codes(layer: SlotLayer, call: Call) -> bool:
    """Whether kernels can run a decoded token over codes, and return what the policy needs.

    Keys that are rotated to their places at each step are not read as they lie.
    """
    form = layer.slots.form
    if not isinstance(form, CodedForm) or form.kernel_forms not in CODES:
        return False
    if layer.policy.observes_rows or call.place_keys is not None:
        return False
    if torch.compiler.is_compiling():
        return bool(layer.parts.kernel)
    return can_run(call, CODES[form.kernel_forms], value_dim=form.sample[1].shape[-1])


def may_attend(layer: SlotLayer, call: Call) -> bool:
    """Whether kernels can attend the decoded tokens of static steps, which are like this call."""
    if layer.chunked or layer.policy.observes_rows or call.key is not call.raw_key:
        return False
    if isinstance(layer.slots.form, CodedForm):
        return can_count_codes(layer, call)
    return can_run(call, Family.SLOTS)


def count_block(layer: SlotLayer, call: Call, block: Block, observed: bool) -> Tensor:
    """Attend a block; add its columns to the block's state if the policy observes.

    Returns:
        (batch, heads, q_len, value_dim).
    """
    from kvtool.kernels.column_sums import column_sums

    batch, heads = call.query.shape[:2]
    total = call.key.shape[2]
    if layer.padded:
        stored = block.view.positions
        new = block.new.expand(batch, -1)
    else:
        order = torch.arange(total, device=call.query.device)
        stored = order.expand(batch, 1, -1)
        new = order[block.kept :].expand(batch, -1)
    scale, window, softcap = call.scale, layer.window, call.softcap
    averaged = observed and "above_average" in layer.policy.columns
    if _runs_causal(layer, call, block, observed):
        from kvtool.kernels.attend_causal import attend_causal

        out, lse = attend_causal(call.query, call.key, call.value, scale=scale)
        count = torch.arange(1, total + 1, dtype=torch.float32, device=lse.device)
        seen = count.expand_as(lse).contiguous() if averaged else None
    else:
        from kvtool.kernels.attend_rows import attend_rows

        out, lse, seen = attend_rows(
            call.query,
            call.key,
            call.value,
            new,
            stored,
            in_order=not layer.padded,
            window=window,
            **_how(call, batch),
            counted=averaged,
        )
    if call.context.norms is not None and not (block.kept or layer.padded):
        call.context.norms.append(lse)
    if not observed:
        return out

    given = call.query, call.key, new, stored, lse, seen
    add = partial(column_sums, *given, scale=scale, window=window, softcap=softcap)
    sums = {name: block.state[name] for name in layer.policy.columns}
    if sums:
        add(sums)
    if block.waiting is not None:
        by_head = out.new_zeros((batch, heads, total), dtype=torch.float32)
        add({"attention_sum": by_head})
        grouped = by_head.view(batch, layer.slots.kv_heads, -1, total)
        block.waiting.add(grouped, block.view.block)
    return out


def _runs_causal(layer: SlotLayer, call: Call, block: Block, observed: bool) -> bool:
    """Whether torch's own kernels can attend the block: a whole prompt that needs no mask.

    What stays is decided by these numbers, so float32 is left to Triton, which never rounds it.
    """
    if layer.padded or block.kept or layer.window is not None:
        return False
    if call.softcap is not None or call.sinks is not None:
        return False
    halves = call.query.element_size() == 2
    return (halves or not observed) and can_run(call, Family.CAUSAL)


def count_slots(layer: SlotLayer, call: Call) -> AttendedToken:
    """Attend a decoded token, and add what each slot receives to the layer's state.

    Returns:
        The output, and the weights if the policy ranks slots by them.
    """
    positions = layer.slots.positions[:, :, : layer.slots.used] if layer.masked else None
    place = None if call.positions is None else call.positions[:, 0]
    how = _how(call, len(call.query)) | {"place": place, "weights": _ranks_by_weights(layer)}
    if layer.attends_codes:
        return _counted(layer, call, *_over_codes(layer, call, positions, how))
    from kvtool.kernels.attend_slots import attend_slots

    state = used_state(layer)
    sums = {name: state[name] for name in layer.policy.columns}
    found = attend_slots(call.query, call.key, call.value, positions, sums, **how)
    return _counted(layer, call, *found)


def _ranks_by_weights(layer: SlotLayer) -> bool:
    return layer.policy.ranking.evidence is Evidence.LAST_ROWS and decode_needs_rows(layer)


def _counted(layer: SlotLayer, call: Call, out: Tensor, weights: Tensor | None) -> AttendedToken:
    """Give the policy the weights, (batch, heads, slots), if it ranks by them."""
    if weights is None or not _ranks_by_weights(layer):
        return AttendedToken(out, counted=True)
    slots, visible = layer.slots, None
    valid = None if call.positions is None else call.positions >= 0
    if layer.masked:
        visible = (slots.positions[:, :, : slots.used] >= 0)[:, :, None]
    grouped = weights.view(len(weights), slots.kv_heads, -1, 1, weights.shape[-1])
    return AttendedToken(out, rows=AttentionRows(grouped, visible, valid), counted=True)


def write_and_attend(layer: SlotLayer, call: Call) -> AttendedToken:
    """Attend a decoded token that is not written yet, in a static step: write and count it, too.

    Where the policy's choice can be said in numbers, the slot of the next token is chosen as well.
    """
    from kvtool.kernels.decode_token import decode_token

    slots, policy, new = layer.slots, layer.policy, layer.take_unwritten()
    assert new is not None, "a token is to be written"
    assert new.place is not None, "it is counted"
    how, choice = _how(call, len(call.query)), choice_in_numbers(layer)
    by, by_values, limits = choice or ("", False, [])
    counted = layer.lengths if layer.lengths is not None else layer.seen_device
    out, weights = decode_token(
        call.query,
        [slots.keys, slots.values, slots.positions, slots.next_slot()],
        [slots.state[name] for name in policy.columns],
        [new.key, new.value, new.place],
        how.pop("sinks"),
        None if choice is None or counted is None else counted.flatten(),
        names=" ".join(policy.columns),
        used=slots.used,
        masked=layer.padded,
        weights=_ranks_by_weights(layer),
        appends=slots.reserved is not None,
        score=by,
        by_values=by_values,
        limits=limits,
        **how,
    )
    if choice is not None:
        return AttendedToken(out, counted=True, chosen=True)
    return _counted(layer, call, out, weights)


def _over_codes(
    layer: SlotLayer, call: Call, positions: Tensor | None, how: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Attend codes, by a query that is rotated as keys are; rotate the output back as values."""
    from kvtool.kernels.decode_token import decode_codes

    slots, columns, form = layer.slots, layer.policy.columns, layer.slots.form
    assert isinstance(form, CodedForm), "these slots hold codes"
    of_values, query, constants = form.rotations[1], call.query, None
    if form.shifted or form.rotations[0] is not None:
        rotated, added = form.rotated_query(group_queries(query.float(), slots.kv_heads))
        query = rotated.flatten(1, 2).to(query.dtype)
        constants = None if added is None else added.flatten(1)
    stored = slots.used_stored()
    out, weights = decode_codes(
        query,
        [stored[name] for name in ("keys", "key_scales", "values", "value_scales")],
        positions,
        [slots.state[name] for name in columns],
        how.pop("sinks"),
        how.pop("place"),
        constants,
        names=" ".join(columns),
        forms=" ".join(form.kernel_forms),
        value_dim=form.sample[1].shape[-1],
        **how,
    )
    return out if of_values is None else of_values.rotate_back(out).to(query.dtype), weights


def attend_chosen(
    call: Call, query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, *, padded: bool = False
) -> Tensor:
    """Attend some slots by some rows of a decoded token, where they lie: none is copied.

    Args:
        query: (rows, heads, 1, head_dim).
        keys, values: (rows, kv_heads, capacity, dim).
        slots: (rows, kv_heads, count) or (rows, kv_heads, group, count) int64.
        padded: whether some of them are -1 and stand for none.

    Returns:
        (rows, heads, 1, value_dim).
    """
    from kvtool.kernels.attend_slots import attend_slots

    lists, how = slots.flatten(1, -2), _how(call, len(query))
    stands, there = (lists, lists.clamp(min=0)) if padded else (None, lists)
    if torch.compiler.is_compiling():
        from kvtool.kernels.operators import attend_chosen as operator

        return operator(query, keys, values, stands, there, **how)
    return attend_slots(query, keys, values, stands, {}, chosen=there, **how)[0]


def _how(call: Call, batch: int) -> dict[str, Any]:
    """How a call's logits are made, with sinks as (batch, heads)."""
    sinks = call.sinks
    if sinks is not None:
        sinks = sinks.reshape(-1, call.query.shape[1]).expand(batch, -1)
    return {"scale": call.scale, "softcap": call.softcap, "sinks": sinks}
