"""Measure on a model what its configuration does not say: RoPE, retrieval heads, recurrent states.

One token is read at two positions: the rotation that leads from the one key to the other is the
layer's. A model for which none does is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvtool.cache.hooks.attachment import ask_once, attachment
from kvtool.cache.hooks.rope import length_kinds
from kvtool.cache.slots.tensor_parallel import heads_of_layer, shards_of
from kvtool.cache.steps.call import Call, PendingStep
from kvtool.cache.whole.cache import KVCache
from kvtool.errors import KvtoolError
from kvtool.maths.rotation import Rotation
from kvtool.model_shape import RECURRENT, layer_kinds, layer_shapes, stores_latents, trained_length
from kvtool.policies.allocate.duo import PROXY, rank_heads, reach_of_heads, read_scores
from kvtool.policies.policy import Policy
from kvtool.policies.scores.full import Full
from kvtool.transformers_versions import cache_argument, eager_families

_PLACE, _STEP = 3, 1000  # of the token that is read twice


def find_rotations(model: PreTrainedModel, layers: list[int], asked: str) -> list[Rotation | None]:
    """Find out how each layer rotates its keys, by reading one token at two positions.

    Returns:
        One for each of `layers`; None where keys do not depend on the position.

    Raises:
        KvtoolError: the keys of a layer cannot be rotated from one position to another.
    """
    return ask_once(model, "rotations", partial(_ask_rotations, model, layers, asked))


def find_query_rotations(
    model: PreTrainedModel, layers: list[int], asked: str
) -> list[Rotation | None]:
    """Find out how each layer rotates its queries, which is how it rotates its keys.

    A layer whose keys the position makes longer or shorter rotates nothing: positions have been
    added to what it reads, and queries are before any rotation already.

    Returns:
        One for each of `layers`; None where nothing is rotated.

    Raises:
        KvtoolError: the queries of a layer cannot be rotated back.
    """
    ask = partial(_ask_rotations, model, layers, asked, added=True)
    return ask_once(model, "rotations of queries", ask)


def _ask_rotations(
    model: PreTrainedModel, layers: list[int], asked: str, *, added: bool = False
) -> list[Rotation | None]:
    """Find the rotations."""
    try:
        _check(model)
        step = min(_STEP, (trained_length(model.config) or _STEP) // 2)
        keys = _read_twice(model, step)
        found: dict[tuple, Rotation] = {}
        return [_find(model, keys[layer], step, found, added=added) for layer in layers]
    except _Unknown as reason:
        kind = _text(model).model_type
        raise KvtoolError(f"{asked} is not available for `{kind}`: it {reason}") from None


class _Unknown(Exception):
    """Why a model's rotation cannot be undone: what "it" does."""


def _text(model: PreTrainedModel):
    return model.config.get_text_config(decoder=True)


def _check(model: PreTrainedModel) -> None:
    """Refuse models whose keys cannot be rotated, whatever the keys look like."""
    text = _text(model)
    reason = None
    if text.model_type in eager_families():
        reason = "runs its own eager attention"
    elif stores_latents(text):
        reason = "stores latents in place of keys"
    elif hasattr(model.config, "vision_config") and "mrope_section" in (text.rope_parameters or {}):
        reason = "places the tokens of images by rows and columns (M-RoPE)"
    elif "position_ids" not in inspect.signature(model.forward).parameters:
        reason = "takes no position ids"
    for module in model.modules():
        for kind in length_kinds(module).values():
            reason = f"turns its keys by the length of the text (RoPE of type {kind})"
    dims = [shape.key_dim for shape in layer_shapes(text) if shape is not None]
    rotated = [2 * len(buffer) for name, buffer in model.named_buffers() if _rotates(name)]
    if reason is None and rotated and min(rotated) > max(dims, default=0):
        reason = f"turns {min(rotated)} numbers, and its heads of {max(dims)} do not split so"
    if reason is not None:
        raise _Unknown(reason)


def _rotates(buffer: str) -> bool:
    """Whether a buffer of a model holds the frequencies of its rotation."""
    return buffer.endswith("inv_freq") and "original" not in buffer


@torch.no_grad()
def _read_twice(model: PreTrainedModel, step: int) -> dict[int, Tensor]:
    """Keys of the same token at two positions, by layer: (2, kv_heads, 1, head_dim)."""
    token = torch.full((2, 1), _text(model).vocab_size // 2, device=model.device)
    places = torch.tensor([[_PLACE], [_PLACE + step]], device=model.device)
    cache = DynamicCache(config=model.config)
    model(input_ids=token, position_ids=places, use_cache=True, **{cache_argument(): cache})
    return {
        i: layer.keys
        for i, layer in enumerate(cache.layers)
        if isinstance(getattr(layer, "keys", None), Tensor)
    }


def _find(
    model: PreTrainedModel, keys: Tensor, step: int, found: dict[tuple, Rotation], *, added: bool
) -> Rotation | None:
    """The rotation from the first key to the second; equal ones are shared."""
    first, second = keys[:1], keys[1:]
    tolerance = (1e-3 if keys.dtype == torch.float32 else 0.03) * second.float().abs().max()
    if (first.float() - second.float()).abs().max() <= tolerance:
        return None
    by = torch.full((1, 1, 1), float(step), dtype=torch.float32, device=keys.device)
    for name, frequencies in model.named_buffers():
        if not _rotates(name) or 2 * len(frequencies) > keys.shape[-1]:
            continue
        for interleaved in (False, True):
            case = (name, interleaved, keys.device)
            if case not in found:
                found[case] = Rotation(frequencies.float().to(keys.device), interleaved)
            rotated = found[case].shift(first, by)
            if (rotated.float() - second.float()).abs().max() <= tolerance:
                return found[case]
    lengths = first.float().norm(dim=-1) - second.float().norm(dim=-1)
    if added and lengths.abs().max() > tolerance:
        return None
    raise _Unknown("places its keys in a way that is not known here")


_TOKENS, _DISTANCES = 1024, 500  # of the random text, and how far back heads are watched


def rank_model(model: PreTrainedModel, source: str) -> Tensor:
    """Rank the KV heads of all attention layers.

    Returns:
        (attention layers, kv_heads) int64, 0 for the head that most needs the whole text.

    Raises:
        UsageError: a file that does not fit the model.
    """
    if source != PROXY:
        stored = [layer for layer in layer_shapes(model.config) if layer is not None]
        return rank_heads(read_scores(source, (len(stored), stored[0].kv_heads)))
    noted = attachment(model)
    assert noted is not None, "build_cache attaches"
    return noted.once("head ranks", lambda: rank_heads(measure_reach(model)))


@torch.no_grad()
def measure_reach(model: PreTrainedModel) -> Tensor:
    """Score every KV head by how far back it looks in a random text, always the same one.

    Returns:
        (attention layers, kv_heads) float32 on the CPU.
    """
    config = model.config.get_text_config(decoder=True)
    n = min(_TOKENS, trained_length(config) or _TOKENS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, n), generator=generator).to(model.device)
    shards = shards_of(model)
    shapes, reaches = layer_shapes(config), list[Tensor]()

    def watch(step: PendingStep, call: Call, out: Tensor) -> None:
        distances = min(_DISTANCES, max(1, n // 2))
        reach = reach_of_heads(call.query, call.raw_key, call.scale, distances)
        shape, held = shapes[step.layer.index], call.raw_key.shape[1]
        heads = heads_of_layer(shards, config, shape, call.query.shape[1], held)
        reaches.append(heads.all(reach[None, :, None], 0).flatten().cpu())

    cache = KVCache(config, Policy(Full()), None)
    cache.watch_steps(watch)
    model(input_ids=ids, use_cache=True, **{cache_argument(): cache})
    return torch.stack(reaches)


def ask_recurrent(model: PreTrainedModel) -> list[Mapping[str, Tensor]]:
    """Read one token to find the states of each layer's recurrence by name, of one sequence."""
    if not any(kind in RECURRENT for kind in layer_kinds(model.config)):
        return [{} for _ in layer_kinds(model.config)]
    return ask_once(model, "recurrent states", lambda: _ask(model))


@torch.no_grad()
def _ask(model: PreTrainedModel) -> list[Mapping[str, Tensor]]:
    cache = DynamicCache(config=model.config)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    model(input_ids=token, use_cache=True, **{cache_argument(): cache})
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
