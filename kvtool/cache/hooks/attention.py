"""The attention and mask functions named `kvtool`, in the form that transformers calls them.

The mask function also finds tokens that see later ones, such as those of an image, whose tokens
attend to each other in both directions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvtool.cache.hooks.masks import dropout_refused, is_callers, note_own
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.part import refusal
from kvtool.cache.steps.attend import any_shared_kv, find_shared_kv
from kvtool.cache.steps.attend_block import attend_shared_kv
from kvtool.cache.steps.call import Call, StepContext, take_mask_target, take_pending
from kvtool.cache.steps.step import run_step
from kvtool.errors import KvtoolError

_ROWS = 1024  # queries whose boolean mask is held at a time


def later_columns(
    mask_function: Callable,
    attention_mask: Tensor | None,
    q_length: int,
    q_offset: int,
    batch: int,
    options: Mapping[str, Any],
) -> Tensor | None:
    """Find out which of the new tokens each one sees, by its model's own mask.

    Returns:
        (batch, q_len, 2) int64, the columns of the first and the last new token seen; None where no
        token sees a later one.
    """
    options = {**options, "allow_is_causal_skip": False, "local_size": None}
    spans = []
    for start in range(0, q_length, _ROWS):
        visible = sdpa_mask(
            batch_size=batch,
            q_length=min(_ROWS, q_length - start),
            kv_length=q_length,
            q_offset=q_offset + start,
            kv_offset=q_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **options,
        )[:, 0]
        columns = torch.arange(q_length, device=visible.device)
        first = torch.where(visible, columns, q_length - 1).amin(-1)
        last = torch.where(visible, columns, 0).amax(-1)
        spans.append(torch.stack([first, last], -1))
    found = torch.cat(spans, 1).expand(batch, -1, -1)
    own = torch.arange(q_length, device=found.device)
    later = found[..., 1] > own
    if not bool(later.any()):  # the one device sync of a prompt block
        return None
    return torch.where(later[..., None], found, own[:, None])


def kvtool_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs,
) -> Tensor | None:
    """Make the mask that a model passes on for a kvtool cache: the positions of the new tokens.

    Returns:
        (batch, 1, q_len, n) int64: true positions, -1 = padding, where a sequence has padding; then
        the first and the last new token that each sees (`Call.spans`), where some see later ones.
        None where neither is. Without a kvtool cache, and where the caller's mask hides or shows
        tokens that were read before, the mask of scaled dot product attention.
    """
    target = take_mask_target()
    if target is None or target.anew:
        if target is not None:
            kwargs["allow_is_causal_skip"] = False
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )
    layer, decoding, _ = target
    plain = kwargs.get("allow_is_causal_skip", True) and not kwargs.get("use_vmap", False)
    spans = None
    if not (plain or decoding):
        spans = later_columns(mask_function, attention_mask, q_length, q_offset, batch_size, kwargs)
    positions = _padded_positions(layer, decoding, attention_mask, q_length, q_offset)
    if spans is None:
        return None if positions is None else note_own(positions[:, None, :, None])
    if positions is None:
        return note_own((layer.seen + spans)[:, None])
    both = torch.stack([positions.gather(1, columns) for columns in spans.unbind(-1)], -1)
    return note_own(torch.cat([positions[..., None], both], -1)[:, None])


def _padded_positions(
    layer: SlotLayer, decoding: bool, attention_mask: Tensor | None, q_length: int, q_offset: int
) -> Tensor | None:
    """True positions of new tokens, (batch, q_len), -1 = padding; None without padding."""
    if attention_mask is None or (decoding and not layer.padded):
        return None
    new = attention_mask[:, q_offset : q_offset + q_length].bool()
    refused = refusal(layer.parts.values(), "left_out", layer.policy) if decoding else None
    if refused is not None and not bool(new.all()):
        raise KvtoolError(refused, hint="leave the mask of a row that has ended at 1")
    if not layer.padded and bool(new.all()):  # the one device sync of a prompt block
        return None
    start = q_offset if layer.lengths is None else layer.lengths[:, None].to(new.device)
    positions = start + new.long().cumsum(-1) - 1
    return torch.where(new, positions, -1)


def kvtool_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention of one layer, in the form that transformers calls it.

    Returns:
        (batch, q_len, heads, value_dim), and None for the weights.

    Raises:
        KvtoolError: an argument that changes the attention and is not understood; a request for the
            weights.
    """
    for name in ("indices", "position_bias"):
        if kwargs.get(name) is not None:
            raise KvtoolError(
                f"this model passes `{name}` to its attention, which a kvtool cache cannot honour"
            )

    def make_call(context: StepContext, raw_key: Tensor, raw_value: Tensor) -> Call:
        mask = attention_mask
        theirs = mask is not None and is_callers(mask)
        mask_columns = 0 if mask is None or theirs else mask.shape[-1]  # see `kvtool_mask`
        return Call(
            query=query,
            key=key,
            value=value,
            raw_key=raw_key,
            raw_value=raw_value,
            positions=None
            if mask is None or mask_columns in (0, 2)
            else mask[:, 0, :, 0].to(query.device),
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=softcap,
            sinks=None if s_aux is None else s_aux.view(key.shape[1], -1),
            spans=None if mask is None or mask_columns < 2 else mask[:, 0, :, -2:].to(query.device),
            context=context,
            mask=mask if theirs else None,
        )

    step = take_pending(key.shape[2])
    if step is None:
        shared = find_shared_kv(key)
        if shared is not None:
            call = make_call(replace(shared.context, shares_kv=False), key, value)
            return attend_shared_kv(shared, call).transpose(1, 2).contiguous(), None
        if getattr(module, "is_kv_shared_layer", False) and any_shared_kv():
            raise KvtoolError(
                "a layer that reads the keys of another has to be on its device",
                hint="load the model with another device_map",
            )
        return _stock(
            module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux, kwargs
        )
    if kwargs.get("output_attentions"):
        raise KvtoolError("output_attentions is not available with a kvtool cache")
    if dropout:
        raise dropout_refused()
    if step.decoding and step.layer.attends_codes and key is not step.raw_key:
        raise KvtoolError(
            "this model works on keys between its cache and its attention, "
            f"which policy `{step.layer.policy}` stores as codes"
        )
    call = make_call(step.context, step.raw_key, step.raw_value)
    if not step.decoding and step.context.unstored is None:
        step.owner.begin_block(step.layer, query.shape[1], call.positions, query.shape[2])
    out = run_step(step.layer, call, step.decoding)
    if step.context.notify:
        step.owner.end_step(step, call, out)
    return out.transpose(1, 2).contiguous(), None


def _stock(module, query, key, value, mask, scaling, dropout, softcap, sinks, kwargs):
    """What transformers itself would run for a forward without a kvtool cache."""
    wanted = kwargs.get("output_attentions")
    if softcap is None and sinks is None and not wanted:
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
    own = sys.modules[type(module).__module__]
    if not hasattr(own, "eager_attention_forward"):
        raise KvtoolError(
            f"`{type(module).__name__}` has no attention that shows its weights "
            "(output_attentions=True)"
        )
    if mask is None and query.shape[2] > 1:
        rows, keys = query.shape[2], key.shape[2]
        mask = torch.ones(rows, keys, dtype=torch.bool, device=query.device)
        mask = mask.tril(keys - rows)[None, None]
    if mask is not None and mask.dtype == torch.bool:
        blocked = torch.finfo(query.dtype).min
        mask = torch.zeros((), dtype=query.dtype, device=query.device).masked_fill(~mask, blocked)
    eager = own.eager_attention_forward
    kwargs = kwargs | {"softcap": softcap, "s_aux": sinks}
    kwargs = {name: option for name, option in kwargs.items() if option is not None}
    return eager(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)
