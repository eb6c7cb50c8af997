"""Write a compressed cache to a file. Slots are written in ascending position."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvtool.cache.files.format import (
    KIND,
    SCHEMA,
    check_one_process,
    weights_labels,
)
from kvtool.cache.hooks.attachment import uncompiled
from kvtool.cache.hooks.probes import recurrent_states
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.slot_form import RANGES, CodedForm
from kvtool.cache.tensor_files.tensor_file import digest_of, write_tensors
from kvtool.cache.whole.cache import KVCache
from kvtool.errors import KvtoolError, printable
from kvtool.identity import config_hash
from kvtool.version import VERSION


def save_cache(
    cache: KVCache,
    path: str | Path,
    *,
    model: PreTrainedModel | None = None,
    input_ids: Tensor | None = None,
    next_logits: Tensor | None = None,
    model_name: str | None = None,
) -> None:
    """Write a cache, whole or not at all.

    Args:
        model: the model that filled it, which loading checks; by default the one it was built for.
        input_ids: (batch, n) all tokens of the text; those beyond what the cache has seen have not
            been fed. By default what `kvtool.generation` has fed; where it is unknown, a loaded
            cache can take further turns, but not go on by itself.
        next_logits: (batch, vocab) of the token after the last, where all tokens have been fed.
        model_name: what to call the model; by default its own name or path.

    Raises:
        KvtoolError: the cache is empty or was interrupted in a forward, or the file cannot be
            written.
    """
    cache.check_whole()
    if cache.get_seq_length() == 0:
        raise KvtoolError("the cache is empty: nothing has been fed to it yet")
    check_one_process(cache)
    model = uncompiled(model) if model is not None else cache.link.model()
    if model is None:
        raise KvtoolError("the model that this cache was built for is gone; pass it as `model`")
    known = cache.input_ids
    if input_ids is None and known is not None and known.shape[1] >= cache.get_seq_length():
        input_ids, next_logits = known, cache.text.next_logits
    tensors = _cache_tensors(cache) | _all_layers(cache)
    if input_ids is not None:
        tensors["input_ids"] = input_ids.cpu().long()
    if next_logits is not None:
        tensors["next_logits"] = next_logits.float().cpu()
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    metadata = _metadata(cache, model, model_name, with_text=input_ids is not None)
    metadata = {key: printable(value) for key, value in metadata.items()}
    metadata["sha256"] = digest_of(tensors, metadata)
    write_tensors(Path(path), tensors, metadata)


def _metadata(
    cache: KVCache, model: PreTrainedModel, model_name: str | None, *, with_text: bool
) -> dict[str, str]:
    """Describe a cache and the model that filled it."""
    metadata = {
        "kind": KIND,
        "schema_version": SCHEMA,
        "policy": str(cache.policy),
        "plan": "" if cache.plan is None else json.dumps(cache.plan.to_data()),
        "budget": "" if cache.budget is None else str(cache.budget),
        "prefill": cache.prefill or "full",
        "tokens_seen": str(max(cache.tokens_seen())),
        "seen": str(cache.get_seq_length()),
        "model": model_name or model.config._name_or_path or model.config.model_type,
        "config_hash": config_hash(model.config),
        **weights_labels(model),
        "kvtool": VERSION,
    }
    if cache.text.chat is not None and with_text:
        metadata["chat"] = cache.text.chat
        history = None if cache.text.history is None else cache.text.history.to_text()
        metadata |= {} if history is None else {"said": history}
    if cache.rope.chosen is not None:
        metadata["rope_lengths"] = ",".join(map(str, cache.rope.chosen.lengths))
    return metadata


def _cache_tensors(cache: KVCache) -> dict[str, Tensor]:
    """What belongs to all layers."""
    tensors = {}
    rows = cache.budgets.spreads
    if rows is not None:
        variance = torch.tensor([row.variance for row in rows], dtype=torch.float64)
        tensors["spread.variance"] = variance
        tensors["spread.queries"] = torch.tensor([row.queries for row in rows])
        tensors["spread.held"] = torch.tensor([list(row.held) for row in rows])
    if cache.link.head_ranks is not None:
        tensors["head_ranks"] = cache.link.head_ranks
    for part in cache.parts.values():
        tensors |= part.tensors()
    traffic = cache.budgets.traffic
    if traffic is not None:
        tensors["read.ends"] = torch.tensor(traffic.ends)
        tensors["read.reserve"] = torch.tensor(cache.budgets.new_tokens)
    lengths = cache.first_layer.lengths
    if lengths is not None:
        tensors["lengths"] = lengths.cpu()
    return tensors


def _all_layers(cache: KVCache) -> dict[str, Tensor]:
    """What each layer holds, recurrent states included."""
    tensors: dict[str, Tensor] = {}
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, SlotLayer):
            tensors |= _layer_tensors(layer, f"layer.{i}")
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            states = recurrent_states(layer)
            tensors |= {f"layer.{i}.{name}": state.cpu() for name, state in states.items()}
    return tensors


def _layer_tensors(layer: SlotLayer, name: str) -> dict[str, Tensor]:
    """What one layer holds: its slots, and each of its parts."""
    slots = layer.sorted_slots()
    tensors = {
        **slots.stored,
        "positions": slots.positions.long(),
        "budget": torch.as_tensor(layer.budget.tokens).reshape(-1),
    }
    if layer.budget.by_head is not None:
        tensors["head_budgets"] = layer.budget.by_head
    tensors |= {f"state.{key}": number for key, number in slots.state.items()}
    form = layer.form
    if isinstance(form, CodedForm) and form.shifted:  # files without them say: nothing is shifted
        tensors |= dict(zip(RANGES, form.ranges, strict=True))
    for part in layer.parts.values():
        tensors |= part.tensors()
    return {f"{name}.{key}": tensor.cpu() for key, tensor in tensors.items()}
