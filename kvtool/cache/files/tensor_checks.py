"""Check what a cache file holds, name by name, before a cache is filled with it.

A checksum tells that a file is as it was written, not that kvtool wrote it. So every tensor is held
against the policy (which names there are), the model (shapes, dtypes, size of the vocabulary) and
the others: what batch entries and heads hold, and the numbers of tokens that they have seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvtool.cache.cache import KVCache
from kvtool.cache.files.checks import bad_file
from kvtool.cache.files.file_tensors import FileTensors
from kvtool.cache.files.layer_checks import check_layer
from kvtool.cache.hooks.shape_probe import ask_recurrent
from kvtool.cache.storage.layer import SlotLayer
from kvtool.model_shape import layer_shapes
from kvtool.sizes import MOST_TOKENS

_FLOATS = (torch.float32, torch.float64)


def check_tensors(
    path: Path,
    metadata: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    cache: KVCache,
    model: PreTrainedModel,
) -> None:
    """Refuse tensors that no cache of this kind has written.

    Args:
        metadata: of the file, checked.
        tensors: of the file, on the CPU.
        cache: an empty one, made as the metadata say.

    Raises:
        KvtoolError: the first tensor that is missing or too many, or does not fit.
    """
    seen, tokens = int(metadata["seen"]), int(metadata["tokens_seen"])
    first = f"layer.{cache.first_layer.index}.keys"
    keys = tensors.get(first)
    if keys is None or keys.dim() != 4 or keys.shape[0] < 1:
        raise bad_file(path, f"`{first}` are missing or have another shape")
    file = FileTensors(path, tensors, seen, keys.shape[0])
    _check_text(file, cache, model, tokens)
    shapes = layer_shapes(model.config)
    for layer in cache.slot_layers:
        shape = shapes[layer.index]
        if shape is not None:
            check_layer(file, cache, layer, shape, model.dtype)
    for i, states in enumerate(ask_recurrent(model)):
        for name, state in states.items():
            whole = f"layer.{i}.{name}"
            if whole in file.left or not isinstance(cache.layers[i], SlotLayer):
                file.take(whole, (file.batch, *state.shape[1:]), state.dtype)
    for name in file.left:
        raise file.bad(name, "belongs to no cache of this policy and model")


def _check_text(file: FileTensors, cache: KVCache, model: PreTrainedModel, tokens: int) -> None:
    """Check lengths, tokens, logits and what is known of whole rows."""
    batch = file.batch
    longest = file.seen if file.lengths is None else int(file.lengths.max())
    if longest != tokens:
        what = f"rows have seen {longest} tokens, and `tokens_seen` is {tokens}"
        raise bad_file(file.path, what)
    config = model.config.get_text_config(decoder=True)
    if "input_ids" in file.left:
        ids = file.take("input_ids", (batch, None), torch.int64, 0, config.vocab_size - 1)
        if not 1 <= ids.shape[1] <= MOST_TOKENS:
            raise file.bad("input_ids", "hold no token")
    logits = (batch, _logits_of(model))
    if "next_logits" in file.left:
        file.take("next_logits", logits, torch.float32, unknown=True)
    if cache.surprisals is not None:
        file.take("state.surprisal", (batch, file.kept(cache.first_layer.index)), torch.float32)
        file.take("state.next_logits", logits, (*_FLOATS, model.dtype), unknown=True)
    free = [layer for layer in cache.slot_layers if layer.window is None]
    if cache.budgets.deferred:
        file.take("spread.variance", (batch, len(free)), torch.float64, 0)
        file.take("spread.queries", (batch,), torch.int64, 1, file.seen)
        file.take("spread.held", (batch, len(free)), torch.int64, 0, file.seen)
    if cache.budgets.traffic is not None:
        ends = file.left.get("read.ends")
        rows = batch if ends is not None and ends.numel() > 1 else 1
        file.take("read.ends", (rows,), torch.int64, 1, file.seen)
        file.take("read.reserve", (), torch.int64, 0, MOST_TOKENS)
    split = cache.policy.head_split
    if split is not None and split.scores is not None:
        file.left.pop("head_ranks", None)  # checked before the cache was made


def _logits_of(model: PreTrainedModel) -> int:
    """Count the logits of a token. Quantised layers of torch hold no weight that is a tensor."""
    head = model.get_output_embeddings()
    size = getattr(head, "out_features", None)
    return int(head.weight.shape[0] if size is None else size)


def check_ranks(path: Path, tensors: Mapping[str, Tensor], model: PreTrainedModel) -> None:
    """Refuse ranks of heads that are not those of every head of the model, before they are used.

    Raises:
        KvtoolError: they are missing, of another shape, or no ranks.
    """
    ranks = tensors.get("head_ranks")
    shapes = [shape for shape in layer_shapes(model.config) if shape is not None]
    if ranks is None or ranks.dtype != torch.int64:
        raise bad_file(path, "`head_ranks` are missing or no whole numbers")
    wanted = (len(shapes), shapes[0].kv_heads)
    if tuple(ranks.shape) != wanted:
        raise bad_file(path, f"`head_ranks` are {list(ranks.shape)}, not {list(wanted)}")
    if not torch.equal(ranks.flatten().sort().values, torch.arange(ranks.numel())):
        raise bad_file(path, "`head_ranks` are not the places of all heads")
