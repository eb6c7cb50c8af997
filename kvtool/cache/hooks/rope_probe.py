"""How a model turns its keys by position, found out by asking it.

Families differ in the layout of the pairs, in how much of a head turns and with which frequencies,
and some layers turn nothing. So one token is read at two positions, and the way that leads from the
one key to the other is the layer's; a model for which no way does is refused.
"""

from __future__ import annotations

import inspect
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvtool.cache.hooks.attachment import ask_once
from kvtool.cache.hooks.families import EAGER_FAMILIES
from kvtool.cache.hooks.rope import length_kinds
from kvtool.errors import KvtoolError
from kvtool.maths.rope import Rotation
from kvtool.model_shape import layer_shapes, stores_latents, trained_length

_PLACE, _STEP = 3, 1000  # of the token that is read twice


def find_rotations(model: PreTrainedModel, layers: list[int]) -> list[Rotation | None]:
    """Find out how each layer turns its keys, by reading one token at two positions.

    Args:
        layers: indices of the attention layers.

    Returns:
        One for each of `layers`; None where keys do not depend on the position.

    Raises:
        KvtoolError: the keys of a layer cannot be turned on from one position to another.
    """
    return ask_once(model, "rotations", partial(_ask_rotations, model, layers, "positions=cache"))


def find_query_rotations(
    model: PreTrainedModel, layers: list[int], policy: str
) -> list[Rotation | None]:
    """Find out how each layer turns its queries, which is how it turns its keys.

    A layer whose keys the position makes longer or shorter turns nothing: positions have been added
    to what it reads, and queries are before any rotation already.

    Args:
        layers: indices of the attention layers.
        policy: the name of the one that needs it.

    Returns:
        One for each of `layers`; None where nothing is turned.

    Raises:
        KvtoolError: the queries of a layer cannot be turned back.
    """
    asked = f"policy `{policy}`"
    ask = partial(_ask_rotations, model, layers, asked, added=True)
    return ask_once(model, "rotations of queries", ask)


def _ask_rotations(
    model: PreTrainedModel, layers: list[int], asked: str, *, added: bool = False
) -> list[Rotation | None]:
    """Find the rotations.

    Args:
        asked: what they are asked for, in an error's words.
        added: whether positions that are added to what a layer reads are none of its concern.
    """
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
    """Refuse what cannot be turned, whatever its keys look like."""
    text = _text(model)
    reason = None
    if text.model_type in EAGER_FAMILIES:
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
    """Whether a buffer of a model holds the frequencies that it turns by."""
    return buffer.endswith("inv_freq") and "original" not in buffer


@torch.no_grad()
def _read_twice(model: PreTrainedModel, step: int) -> dict[int, Tensor]:
    """Keys of the same token at two positions, by layer: (2, kv_heads, 1, head_dim).

    A token alone attends to itself, so that only its position can make its keys differ.
    """
    token = torch.full((2, 1), _text(model).vocab_size // 2, device=model.device)
    places = torch.tensor([[_PLACE], [_PLACE + step]], device=model.device)
    cache = DynamicCache(config=model.config)
    model(input_ids=token, position_ids=places, past_key_values=cache, use_cache=True)
    return {
        i: layer.keys
        for i, layer in enumerate(cache.layers)
        if isinstance(getattr(layer, "keys", None), Tensor)
    }


def _find(
    model: PreTrainedModel, keys: Tensor, step: int, found: dict[tuple, Rotation], *, added: bool
) -> Rotation | None:
    """The rotation that turns the first key on to the second; equal ones are shared."""
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
