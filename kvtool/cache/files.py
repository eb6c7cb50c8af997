"""Compressed caches on disk: one safetensors file that holds a cache and says what it belongs to.

Slots are written in ascending position. A cache that is saved, loaded and continued gives what the
unbroken run gives.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

import kvtool
from kvtool.cache.build import build_cache
from kvtool.cache.cache import KVCache
from kvtool.cache.file_checks import (
    bad_file,
    check_metadata,
    check_ranks,
    check_tensors,
    recurrent_states,
)
from kvtool.cache.slots import SlotLayer
from kvtool.cache.tensor_files import write_tensors
from kvtool.documents.plan import PlanDocument
from kvtool.documents.source import Source
from kvtool.errors import KvtoolError, UsageError
from kvtool.identity import config_hash
from kvtool.policies.allocate.split import Spread
from kvtool.policies.grammar import read_spelling
from kvtool.policies.numbers import SHIFT

_KIND, _VERSION = "kvtool.cache", "1"


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
            been fed. By default what `kvtool.generation` has fed; where nobody knows it, a loaded
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
    _check_whole(cache)
    model = model if model is not None else cache.built_for()
    if model is None:
        raise KvtoolError("the model that this cache was built for is gone; pass it as `model`")
    known = cache.input_ids
    if input_ids is None and known is not None and known.shape[1] >= cache.get_seq_length():
        input_ids, next_logits = known, cache.next_logits
    tensors: dict[str, Tensor] = {}
    if input_ids is not None:
        tensors["input_ids"] = input_ids.cpu().long()
    if next_logits is not None:
        tensors["next_logits"] = next_logits.float().cpu()
    if cache.budgets.spreads is not None:
        rows = cache.budgets.spreads
        variance = torch.tensor([row.variance for row in rows], dtype=torch.float64)
        tensors["spread.variance"] = variance
        tensors["spread.queries"] = torch.tensor([row.queries for row in rows])
        tensors["spread.held"] = torch.tensor([list(row.held) for row in rows])
    if cache.head_ranks is not None:
        tensors["head_ranks"] = cache.head_ranks
    if cache.surprisals is not None:
        scores, next_of_text = cache.surprisals.by_position()
        tensors["state.surprisal"] = scores.cpu()
        tensors["state.next_logits"] = next_of_text.cpu()
    reads = cache.budgets.reads
    if reads is not None:
        tensors["read.ends"] = torch.tensor(reads.ends)
        tensors["read.reserve"] = torch.tensor(cache.budgets.reserve)
    first = cache.first_layer
    if first.ragged:
        tensors["lengths"] = first.lengths.cpu()
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, SlotLayer):
            tensors |= _slot_tensors(layer, f"layer.{i}")
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            tensors |= _recurrent_tensors(layer, f"layer.{i}")
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    metadata = {
        "kind": _KIND,
        "schema_version": _VERSION,
        "policy": str(cache.policy),
        "plan": "" if cache.plan is None else json.dumps(cache.plan.to_data()),
        "budget": "" if cache.budget is None else str(cache.budget),
        "prefill": "full" if cache.block is None else f"block:{cache.block}",
        "tokens_seen": str(max(cache.tokens_seen())),
        "seen": str(cache.get_seq_length()),
        "model": model_name or model.config._name_or_path or model.config.model_type,
        "config_hash": config_hash(model.config),
        "weights": weights_fingerprint(model),
        "kvtool": kvtool.__version__,
    }
    if cache.chat is not None and input_ids is not None:
        metadata["chat"] = cache.chat
    metadata["sha256"] = _digest(tensors, metadata)
    write_tensors(Path(path), tensors, metadata)


def load_cache(path: str | Path, model: PreTrainedModel) -> KVCache:
    """Read a cache back for the model that made it.

    Returns:
        The cache, with the text's tokens in `input_ids`, `next_logits` if all of them had been fed,
        and in `chat` where its conversation stands, if it is one.

    Raises:
        KvtoolError: no such file, not a whole and untouched cache file, or one of another model.
    """
    path = Path(path)
    metadata, tensors = _read(path, with_tensors=True)
    digest = metadata.pop("sha256", "")
    if digest != _digest(tensors, metadata):
        raise KvtoolError(f"`{path}` was changed after it was written: its checksum does not match")
    check_metadata(path, metadata)
    if metadata["config_hash"] != config_hash(model.config):
        raise KvtoolError(
            f"`{path}` holds the cache of another model, `{metadata['model']}`, "
            f"not of `{model.config._name_or_path or model.config.model_type}`"
        )
    if metadata["weights"] != weights_fingerprint(model):
        raise KvtoolError(
            f"`{path}` was made with other weights or another dtype than those loaded, "
            f"of `{metadata['model']}`"
        )
    cache = _empty_cache(path, metadata, tensors, model)
    _check_whole(cache)
    check_tensors(path, metadata, tensors, cache, model)
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, SlotLayer):
            _fill_slots(layer, tensors, f"layer.{i}", int(metadata["seen"]), model)
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            _fill_recurrent(layer, tensors, f"layer.{i}", model)
    if "spread.held" in tensors:
        names = ("spread.variance", "spread.queries", "spread.held")
        rows = zip(*(tensors[name].tolist() for name in names), strict=True)
        cache.budgets.spreads = [Spread(*row) for row in rows]
    if cache.surprisals is not None:
        own = [tensors[f"state.{name}"].to(model.device) for name in ("surprisal", "next_logits")]
        cache.surprisals.fill(*own)
    if cache.budgets.reads is not None:
        cache.budgets.reads.ends = tensors["read.ends"].tolist()
        cache.budgets.reserve = int(tensors["read.reserve"])
    cache.input_ids = tensors.get("input_ids")
    cache.next_logits = tensors.get("next_logits")
    cache.chat = metadata.get("chat")
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
        ranked = policy.head_split is not None and policy.head_split.ranking
        if ranked:
            check_ranks(path, tensors, model)
        return build_cache(
            model,
            policy,
            metadata["budget"] if metadata["budget"] and plan is None else None,
            prefill=metadata["prefill"],
            plan=plan,
            head_ranks=tensors["head_ranks"] if ranked else None,
        )
    except UsageError as error:
        raise bad_file(path, str(error)) from None


def read_metadata(path: str | Path) -> dict[str, str]:
    """What a cache file says of itself, without its tensors.

    Raises:
        KvtoolError: no such file, or not a cache file.
    """
    metadata = _read(Path(path), with_tensors=False)[0]
    check_metadata(Path(path), metadata)
    return metadata


def _read(path: Path, *, with_tensors: bool) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not path.is_file():
        raise KvtoolError(f"no cache file at `{path}`")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            _check_kind(path, metadata)
            names = list(file.keys()) if with_tensors else []
            tensors = {name: file.get_tensor(name) for name in names}
    except KvtoolError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise KvtoolError(
            f"`{path}` is not a whole cache file: it is truncated or damaged"
        ) from error
    return metadata, tensors


def _check_kind(path: Path, metadata: dict[str, str]) -> None:
    if metadata.get("kind") != _KIND:
        raise KvtoolError(f"`{path}` is not a kvtool cache file")
    if metadata.get("schema_version") != _VERSION:
        raise KvtoolError(
            f"`{path}` has schema version {metadata.get('schema_version')}; "
            f"this kvtool reads {_VERSION}"
        )


def _digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _check_whole(cache: KVCache) -> None:
    """Refuse a cache of which each process holds a part of the heads."""
    if cache.shards.processes > 1:
        raise UsageError(
            "a cache file holds all KV heads, and each of the "
            f"{cache.shards.processes} processes has its own",
            hint="save and load caches in one process",
        )


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Hash of the dtype and a few numbers of every weight, which fine-tuned siblings differ in."""
    sample = [
        weight.detach().flatten()[:8].float().to(model.device)
        for weight in (_local(weight) for weight in model.parameters())
        if not weight.is_meta
    ]
    numbers = torch.cat(sample).cpu().numpy().tobytes() if sample else b""
    return hashlib.sha256(str(model.dtype).encode() + numbers).hexdigest()


def _local(weight: Tensor) -> Tensor:
    """The part of a weight that this process holds, if it is split over processes."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _slot_tensors(layer: SlotLayer, name: str) -> dict[str, Tensor]:
    keys, values, positions, state = layer.sorted_slots()
    tensors = {
        f"{name}.keys": keys,
        f"{name}.values": values,
        f"{name}.positions": positions.long(),
        f"{name}.budget": torch.as_tensor(layer.budget or 0).reshape(-1)
        if not isinstance(layer.budget, Tensor)
        else layer.budget.reshape(-1),
    }
    if layer.head_budgets is not None:
        tensors[f"{name}.head_budgets"] = layer.head_budgets
    tensors |= {f"{name}.state.{key}": number for key, number in state.items()}
    tensors |= {f"{name}.memory.{key}": number for key, number in layer.memory.items()}
    if layer.calibration is not None:
        aside = layer.calibration.tensors()
        tensors |= {f"{name}.calibration.{key}": tensor for key, tensor in aside.items()}
    if layer.marked is not None:
        tensors[f"{name}.marked"] = layer.marked
    return {key: tensor.cpu() for key, tensor in tensors.items()}


def _fill_slots(
    layer: SlotLayer, tensors: dict[str, Tensor], name: str, seen: int, model: PreTrainedModel
) -> None:
    device = _layer_device(model, layer.index)
    aside = _below(tensors, f"{name}.calibration.")
    if layer.calibration is not None:
        layer.calibration.load(aside, device)
    own = {
        key: tensor.to(device)
        for key, tensor in _below(tensors, f"{name}.").items()
        if not key.startswith("calibration.")  # its place is on the host
    }
    layer.lazy_initialization(own["keys"], own["values"])
    rows = own["budget"].tolist()
    layer.least, layer.most = min(rows), max(rows)
    layer.budget = layer.most if layer.least == layer.most else own["budget"][:, None, None]
    state = {key: own[f"state.{key}"] for key in layer.state}
    layer.memory |= _below(own, "memory.")
    if SHIFT in state:
        layer.reach = int(state[SHIFT].abs().max())
    layer.replace(own["keys"], own["values"], own["positions"].to(torch.int32), state)
    layer.marked = own.get("marked")
    layer.seen = seen
    if "lengths" in tensors:
        layer.lengths = tensors["lengths"].to(device)
    layer.head_budgets = own.get("head_budgets")
    if layer.head_budgets is not None:
        layer.split_by_head()


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}


def _recurrent_tensors(layer: LinearAttentionCacheLayerMixin, name: str) -> dict[str, Tensor]:
    return {f"{name}.{key}": state.cpu() for key, state in recurrent_states(layer).items()}


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
