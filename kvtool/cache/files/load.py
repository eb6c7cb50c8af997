"""Read a compressed cache back from a file.

A cache that is saved, loaded and continued gives what the unbroken run gives.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvtool.cache.entry.build import make_cache
from kvtool.cache.files.checks import check_ranks, check_tensors, read_rope
from kvtool.cache.files.format import (
    bad_file,
    check_metadata,
    check_one_process,
    has_weights,
    read_file,
)
from kvtool.cache.hooks.attachment import uncompiled
from kvtool.cache.slots.buffers import Slots
from kvtool.cache.slots.layer import SlotLayer
from kvtool.cache.slots.ragged import to_ragged
from kvtool.cache.slots.sizing import LayerBudget
from kvtool.cache.slots.slot_form import RANGES, CodedForm
from kvtool.cache.tensor_files.tensor_file import digest_of
from kvtool.cache.whole.cache import KVCache
from kvtool.documents.messages import read_history
from kvtool.documents.plan import PlanDocument
from kvtool.documents.source import Source
from kvtool.errors import KvtoolError, UsageError
from kvtool.identity import config_hash
from kvtool.maths.quantise import ChannelRanges
from kvtool.model_shape import layer_shapes
from kvtool.policies.allocate.split import Spread
from kvtool.policies.grammar import read_spelling


def load_cache(path: str | Path, model: PreTrainedModel) -> KVCache:
    """Read a cache back for the model that made it.

    Returns:
        The cache, with the text's tokens in `input_ids`, `next_logits` if all of them had been fed,
        and in `chat` where its conversation ended, if it is one.

    Raises:
        KvtoolError: no such file, not a whole and untouched cache file, or one of another model.
    """
    path, model = Path(path), uncompiled(model)
    metadata, tensors = read_file(path, with_tensors=True)
    digest = metadata.pop("sha256", "")
    if digest != digest_of(tensors, metadata):
        raise KvtoolError(f"`{path}` was changed after it was written: its checksum does not match")
    check_metadata(path, metadata)
    if metadata["config_hash"] != config_hash(model.config):
        raise KvtoolError(
            f"`{path}` holds the cache of another model, `{metadata['model']}`, "
            f"not of `{model.config._name_or_path or model.config.model_type}`"
        )
    if not has_weights(model, metadata):
        raise KvtoolError(
            f"`{path}` was made with other weights or another dtype than those loaded, "
            f"of `{metadata['model']}`"
        )
    cache = _empty_cache(path, metadata, tensors, model)
    check_one_process(cache)
    check_tensors(path, metadata, tensors, cache, model)
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, SlotLayer):
            _fill_layer(layer, tensors, f"layer.{i}", int(metadata["seen"]), model)
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            _fill_recurrent(layer, tensors, f"layer.{i}", model)
    if "spread.held" in tensors:
        names = ("spread.variance", "spread.queries", "spread.held")
        rows = zip(*(tensors[name].tolist() for name in names), strict=True)
        cache.budgets.load([Spread(*row) for row in rows])
    for part in cache.parts.values():
        part.load(tensors, model.device)
    if cache.budgets.traffic is not None:
        cache.budgets.traffic.load(tensors["read.ends"].tolist())
        cache.budgets.expect(int(tensors["read.reserve"]))
    cache.remember(tensors.get("input_ids"), tensors.get("next_logits"))
    cache.resume_rope(read_rope(path, metadata, cache))
    chat, said = metadata.get("chat"), metadata.get("said")  # which older files do not hold
    try:
        history = None if said is None else read_history(said)
    except ValueError as error:
        raise bad_file(path, f"`said`: {error}") from None
    cache.end_with("open" if chat == "open" else "answer" if chat == "answer" else None, history)
    return cache


def _empty_cache(
    path: Path, metadata: dict[str, str], tensors: dict[str, Tensor], model: PreTrainedModel
) -> KVCache:
    """Make the cache that a file holds the content of."""
    try:
        policy = read_spelling(metadata["policy"])
        plan = None
        if metadata.get("plan"):
            plan = Source.parse(metadata["plan"], "plan").validate(PlanDocument)
        ranked = policy.head_split is not None and policy.head_split.scores is not None
        if ranked:
            check_ranks(path, tensors, model)
        return make_cache(
            model,
            policy,
            metadata["budget"] if metadata["budget"] and plan is None else None,
            prefill=metadata["prefill"],
            plan=plan,
            head_ranks=tensors["head_ranks"] if ranked else None,
        )
    except UsageError as error:
        raise bad_file(path, str(error)) from None


def _fill_layer(
    layer: SlotLayer, tensors: dict[str, Tensor], name: str, seen: int, model: PreTrainedModel
) -> None:
    device = _layer_device(model, layer.index)
    prefix = f"{name}."
    named = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
    on_host = "calibration."  # whose place it is
    own = {key: t if key.startswith(on_host) else t.to(device) for key, t in named.items()}
    shape, sizes = layer_shapes(model.config)[layer.index], own["keys"].shape[:2]
    dims = () if shape is None else (shape.key_dim, shape.value_dim)
    layer.lazy_initialization(
        *(torch.empty(*sizes, 0, dim, dtype=model.dtype, device=device) for dim in dims)
    )
    form = layer.slots.form
    if isinstance(form, CodedForm) and RANGES[0] in own:
        ranges = ChannelRanges(*(own[name] for name in RANGES))
        layer.slots.set_form(form.with_ranges(ranges, shifted=True))
    for part in layer.parts.values():
        part.load(own, device)
    budget = LayerBudget.of(own["budget"].tolist(), device, own.get("head_budgets"))
    layer.set_budget(budget)
    state = {key: own[f"state.{key}"] for key in layer.slots.state}
    positions = own["positions"].to(torch.int32)
    stored = {key: own[key] for key in layer.slots.stored}
    layer.slots.replace(Slots(stored, positions, state))
    layer.count_from(seen, tensors["lengths"].to(device) if "lengths" in tensors else None)
    if budget.by_head is not None:
        to_ragged(layer, layer.sorted_slots())


def _fill_recurrent(
    layer: LinearAttentionCacheLayerMixin,
    tensors: dict[str, Tensor],
    name: str,
    model: PreTrainedModel,
) -> None:
    for i in range(layer.number_of_states):
        convolution = tensors.get(f"{name}.convolution.{i}")
        recurrence = tensors.get(f"{name}.recurrence.{i}")
        if convolution is not None:
            layer.lazy_initialization(conv_states=convolution.to(model.device), state_idx=i)
            layer.conv_states[i].copy_(convolution)
            layer.has_previous_state[i] = True
        if recurrence is not None:
            layer.lazy_initialization(recurrent_states=recurrence.to(model.device), state_idx=i)
            layer.recurrent_states[i].copy_(recurrence)


def _layer_device(model: PreTrainedModel, index: int) -> torch.device:
    """Where a layer runs, which is not where its weights rest if they are offloaded."""
    for name in getattr(model, "hf_device_map", None) or {}:
        if name.endswith(f".{index}"):
            hook = getattr(model.get_submodule(name), "_hf_hook", None)
            device = getattr(hook, "execution_device", None)
            return model.device if device is None else torch.device(device)
    return model.device
