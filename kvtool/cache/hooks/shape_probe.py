"""The states of recurrences that a model keeps, found out by asking it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvtool.cache.hooks.attachment import ask_once
from kvtool.model_shape import RECURRENT, layer_kinds


def ask_recurrent(model: PreTrainedModel) -> list[Mapping[str, Tensor]]:
    """Read one token to find the states of each layer's recurrence by name, of one row."""
    if not any(kind in RECURRENT for kind in layer_kinds(model.config)):
        return [{} for _ in layer_kinds(model.config)]
    return ask_once(model, "recurrent states", lambda: _ask(model))


@torch.no_grad()
def _ask(model: PreTrainedModel) -> list[Mapping[str, Tensor]]:
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    model(input_ids=token, past_key_values=cache, use_cache=True)
    return [recurrent_states(layer) for layer in cache.layers]


def recurrent_states(layer: object) -> dict[str, Tensor]:
    """Return the states of a layer with a recurrence, by their names in a file."""
    states: dict[str, Tensor] = {}
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return states
    for i in range(layer.number_of_states):
        if layer.is_conv_states_initialized[i]:
            states[f"convolution.{i}"] = layer.conv_states[i]
        if layer.is_recurrent_states_initialized[i]:
            states[f"recurrence.{i}"] = layer.recurrent_states[i]
    return states
