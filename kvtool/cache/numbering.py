"""Position ids by place in the cache: what a model is fed where `positions=cache`.

Keys are cached after RoPE, whose angles lose their precision at large positions (0.06 rad at a
million in float32). So new tokens are numbered on from the tokens that the cache holds, whatever
the caller says, and never beyond what a model was trained for. True positions are the cache's own.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvtool.cache.cache import KVCache
from kvtool.cache.handover import Fed
from kvtool.errors import KvtoolError


def install(model: PreTrainedModel) -> RemovableHandle:
    """Number the tokens of every forward over a cache that asks for it."""
    return model.get_decoder().register_forward_pre_hook(_renumber, with_kwargs=True)


def _renumber(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, KVCache) or not cache.renumbers:
        return None
    if args:
        names = inspect.signature(module.forward).parameters
        kwargs = dict(zip(names, args, strict=False)) | kwargs
    tokens = kwargs.get("input_ids")
    if tokens is None:
        tokens = kwargs["inputs_embeds"]
    q_len = tokens.shape[1]
    cache.fed = _number(cache, q_len)
    mask = kwargs.get("attention_mask")
    places = _places(cache.fed, tokens.shape[0], q_len, mask, tokens.device)
    return (), kwargs | {"position_ids": places}


def _number(cache: KVCache, q_len: int) -> Fed:
    """Where the new tokens of each row begin: behind the longest of its heads, in layer 0."""
    first = cache.first_layer
    seen = first.seen if first.clock is None else None
    if seen == 0 or not (first.ragged or first.lanes):
        return Fed(seen, first.kept, first.kept + q_len)
    stored = first.stored_positions()
    return Fed(seen, (stored >= 0).sum(-1).amax(1), stored.shape[2] + q_len)


def _places(fed: Fed, batch: int, q_len: int, mask: Tensor | None, device: torch.device) -> Tensor:
    """Position ids of the new tokens, counted without padding: (batch, q_len) int64."""
    start = fed.start
    if isinstance(start, Tensor):
        start = start.to(device)[:, None]
    if mask is None:
        return (start + torch.arange(q_len, device=device)).expand(batch, -1)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise KvtoolError("positions=cache needs an attention mask of two dimensions, or none")
    valid = mask[:, -q_len:].to(device).bool()
    return (start + valid.long().cumsum(1) - 1).clamp(min=0)
