"""The attention and mask functions named `kvtool`, and how a model is made to use them."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from kvtool.cache import eager_hooks, handover, logit_hooks, numbering, torn, unused
from kvtool.cache.kernels import Call
from kvtool.cache.layers import check_layers
from kvtool.cache.step import attend
from kvtool.errors import KvtoolError
from kvtool.transformers_versions import layer_types

NAME = "kvtool"

_INDEXED = ("index_topk", "index_n_heads", "index_head_dim")
_KEY_BIASED = ("bloom", "mpt")


def attach(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model run kvtool's attention, with or without a kvtool cache; `detach` undoes it.

    Families without transformers' attention interface (Falcon, GPT-J) keep their own eager
    attention, watched by hooks: the same policies, but a prompt's weights are held in full while it
    runs.

    Returns:
        The model.

    Raises:
        KvtoolError: the model's attention cannot be replaced, or its layers cannot be compressed.
    """
    if handover.attachment(model) is not None:
        return model
    check_supported(model.config)
    previous = handover.Attachment(model.config._attn_implementation)
    if model.config.get_text_config(decoder=True).model_type in eager_hooks.FAMILIES:
        if previous.implementation not in ("eager", "sdpa"):
            raise KvtoolError(
                f"`{model.config.model_type}` was loaded with {previous.implementation}, "
                "which shows nobody its attention weights",
                hint="load it with attn_implementation eager",
            )
        # these families refuse `set_attn_implementation`, and read the name at every call
        model.config._attn_implementation = "eager"
        previous.eager = True
        previous.hooks += eager_hooks.install(model)
    else:
        if not model._can_set_attn_implementation():
            raise KvtoolError(
                f"the attention of `{model.config.model_type}` cannot be replaced: "
                "it predates transformers' interface"
            )
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise KvtoolError(
                f"transformers did not switch `{model.config.model_type}` to kvtool's attention"
            )
    # first of all, so that nothing has happened yet
    previous.hooks += [*unused.install(model), *torn.install(model)]
    previous.hooks += [*logit_hooks.install(model), numbering.install(model)]
    previous.hooks += torn.install_end(model)
    model._kvtool_attachment = previous
    return model


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model its own attention back.

    Returns:
        The model.
    """
    previous = handover.attachment(model)
    if previous is None:
        return model
    for hook in previous.hooks:
        hook.remove()
    if previous.eager:
        model.config._attn_implementation = previous.implementation
    else:
        model.set_attn_implementation(previous.implementation)
    del model._kvtool_attachment
    return model


def check_supported(config: PreTrainedConfig) -> None:
    """Refuse, before anything is loaded or run, what cannot work.

    Raises:
        KvtoolError: one line that says why.
    """
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise KvtoolError(
            f"`{kind}` is an encoder-decoder model; only decoders have a cache to compress"
        )
    text = config.get_text_config(decoder=True)
    if kind in _KEY_BIASED or getattr(text, "alibi", False):
        raise KvtoolError(
            f"`{kind}` adds a bias by the index of a key (ALiBi), which eviction would shift"
        )
    if any(getattr(text, name, None) for name in _INDEXED):
        raise KvtoolError(
            f"`{kind}` selects keys by their index (sparse attention), which eviction would shift"
        )
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise KvtoolError(f"`{kind}` attends in both directions, so it has no cache to compress")
    if not hasattr(text, "num_attention_heads") and not hasattr(text, "n_head"):
        raise KvtoolError(f"`{kind}` has no attention layers, so there is no cache to compress")
    check_layers(text)


def notes(config: PreTrainedConfig) -> list[str]:
    """What a user of this model should know before a run, one line each."""
    text = config.get_text_config(decoder=True)
    lines = []
    if text.model_type in eager_hooks.FAMILIES:
        lines.append(
            f"`{text.model_type}` runs its own eager attention, watched by hooks: "
            "a prompt's attention weights exist in full while it runs"
        )
    options = [option for _, option in layer_types(text)]
    windows = [option["sliding_window"] for option in options if "sliding_window" in option]
    if windows:
        rest = len(options) - len(windows)
        effect = f"the budget is that of the other {rest}" if rest else "there is nothing to evict"
        lines.append(
            f"{len(windows)} of {len(options)} layers slide over a window of {windows[0]} tokens "
            f"and keep just that; {effect}"
        )
    return lines


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
    """The mask that a model passes on for a kvtool cache: the positions of the new tokens.

    Returns:
        (batch, 1, q_len, 1) int64 true positions, -1 = padding; None where no row has padding.
        Without a kvtool cache, the mask of scaled dot product attention.
    """
    layer, decoding = handover.announced()
    if layer is None:
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
    if kwargs.get("use_vmap", False):
        raise KvtoolError("only causal and sliding-window masks are supported with a kvtool cache")
    if attention_mask is None:
        return None
    if decoding and not layer.ragged:
        return None
    new = attention_mask[:, q_offset : q_offset + q_length].bool()
    if decoding and layer.reader is not None and not bool(new.all()):
        raise KvtoolError(
            f"policy `{layer.policy}` cannot leave out a row among decoded tokens",
            hint="leave the mask of a row that has ended at 1",
        )
    if not layer.ragged and bool(new.all()):  # the one device sync of a prompt block
        return None
    start = layer.lengths[:, None].to(new.device) if layer.ragged else q_offset
    positions = start + new.long().cumsum(-1) - 1
    return torch.where(new, positions, -1)[:, None, :, None]


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
    taken = handover.pick_up(key.shape[2])
    if taken is None:
        return _stock(
            module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux, kwargs
        )
    if kwargs.get("output_attentions"):
        raise KvtoolError("output_attentions is not available with a kvtool cache")
    positions = None if attention_mask is None else attention_mask[:, 0, :, 0].to(query.device)
    cache, layer = taken.cache, taken.layer
    if not taken.decoding:
        cache.set_heads(layer, query.shape[1])
        cache.set_budget(layer, positions, query.shape[2])
    call = Call(
        query=query,
        key=key,
        value=value,
        raw_key=taken.raw_key,
        raw_value=taken.raw_value,
        positions=positions,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=s_aux,
        kernel=cache.kernel,
        block=cache.layer_block,
        last=cache.last_block,
        fed=cache.fed,
    )
    out = attend(layer, call, taken.decoding)
    cache.layer_done(layer)
    if cache.watch is not None:
        cache.watch(taken, call, out)
    return out.transpose(1, 2).contiguous(), None


def _stock(module, query, key, value, mask, scaling, dropout, softcap, sinks, kwargs):
    """What transformers itself would run for a forward without a kvtool cache."""
    if softcap is None and sinks is None:
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if mask is None and query.shape[2] > 1:
        rows, keys = query.shape[2], key.shape[2]
        mask = torch.ones(rows, keys, dtype=torch.bool, device=query.device)
        mask = mask.tril(keys - rows)[None, None]
    if mask is not None and mask.dtype == torch.bool:
        blocked = torch.finfo(query.dtype).min
        mask = torch.zeros((), dtype=query.dtype, device=query.device).masked_fill(~mask, blocked)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    kwargs = kwargs | {"softcap": softcap, "s_aux": sinks}
    kwargs = {name: option for name, option in kwargs.items() if option is not None}
    return eager(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)


AttentionInterface.register(NAME, kvtool_attention)
AttentionMaskInterface.register(NAME, kvtool_mask)
