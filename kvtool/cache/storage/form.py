"""The form in which keys and values lie in slots: as they are, or as codes beside scales.

What is stored is a few tensors by name, (batch, kv_heads, slots, ..) each, which are moved, copied
and counted alike. Only a form knows what is in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.maths.quantise import RandomRotation, lost_share
from kvtool.maths.selection import take
from kvtool.policies.codec.codec import Codec

if TYPE_CHECKING:
    from typing_extensions import Self

Stored = dict[str, Tensor]

SLICE = 1024
"""Slots that are decoded at a time."""

_LOST = 0.7  # share of what most channels say that rounding may lose; measured: answers hold below
_FEWEST, _MOST = 8, 256  # tokens of the first block by which it is judged


class Form:
    """Keys and values as they are.

    Attributes:
        codec: that makes the codes; None: there are none.
    """

    codec: Codec | None = None

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Take in what is like the keys and values to store, (batch, kv_heads, tokens, dim)."""
        self.sample = tuple(_empty(tensor) for tensor in (keys, values))

    def __deepcopy__(self, memo: dict) -> Self:
        return self  # nothing in it ever changes

    @property
    def full_token_bytes(self) -> int:
        """Bytes of the key and value of one token in one KV head, in the dtype of the model."""
        return sum(tensor.shape[-1] * tensor.element_size() for tensor in self.sample)

    def encode(self, keys: Tensor, values: Tensor) -> Stored:
        """Return what is stored of keys and values."""
        return {"keys": keys, "values": values}

    def decode(self, stored: Stored) -> tuple[Tensor, Tensor]:
        """Return keys and values in the dtype of the model."""
        return stored["keys"], stored["values"]

    def join(self, stored: Stored, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is stored and a block behind it, in the dtype of the model."""
        return torch.cat([stored["keys"], keys], 2), torch.cat([stored["values"], values], 2)

    def decode_keys(self, stored: Stored) -> Tensor:
        """Return the keys alone."""
        return stored["keys"]

    def decode_values(self, stored: Stored) -> Tensor:
        """Return the values alone."""
        return stored["values"]


class CodedForm(Form):
    """Codes and scales of keys and values.

    Attributes:
        rotations: of keys and of values, before they are rounded; None: there are none.
    """

    codec: Codec

    def __init__(self, codec: Codec, layer: int, keys: Tensor, values: Tensor) -> None:
        """Prepare to store what is like these.

        Args:
            layer: index in the model.
        """
        super().__init__(keys, values)
        self.codec = codec
        with torch.inference_mode(False):
            self.rotations = tuple(
                codec.rotation(layer, tensor.shape[-1], tensor.device) for tensor in (keys, values)
            )

        if keys.shape[0] * keys.shape[2] >= _FEWEST:
            self._check(layer, keys[:, :, :_MOST].detach(), values[:, :, :_MOST].detach())

    def _check(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Refuse keys and values of which rounding would leave the largest channels alone.

        Biases of some models (Qwen2) make a few channels of every key hundreds of times larger.

        Raises:
            KvtoolError: such keys or values.
        """
        decoded = self.decode(self.encode(keys, values))
        for kind, numbers, rounded in zip(("keys", "values"), (keys, values), decoded, strict=True):
            lost = lost_share(numbers, rounded)
            if lost > _LOST:
                raise KvtoolError(
                    f"`{self.codec.name}` cannot store the {kind} of layer {layer}: a few channels "
                    "are so much larger than the others that rounding would lose the others",
                    hint="do without a codec, or try fp8, which rounds each number by its own size",
                )

    def encode(self, keys: Tensor, values: Tensor) -> Stored:
        if keys.shape == values.shape:  # both at once, which are turned alike
            codes, scales = self.codec.encode(
                _turned(torch.stack([keys, values]), self.rotations[0])
            )
            (key_codes, value_codes), (key_scales, value_scales) = codes.unbind(), scales.unbind()
        else:
            key_codes, key_scales = self.codec.encode(_turned(keys, self.rotations[0]))
            value_codes, value_scales = self.codec.encode(_turned(values, self.rotations[1]))
        return {
            "keys": key_codes,
            "values": value_codes,
            "key_scales": key_scales,
            "value_scales": value_scales,
        }

    def decode(self, stored: Stored) -> tuple[Tensor, Tensor]:
        return self.decode_keys(stored), self.decode_values(stored)

    def join(self, stored: Stored, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return (
            _behind(stored, keys, self.decode_keys),
            _behind(stored, values, self.decode_values),
        )

    def decode_keys(self, stored: Stored) -> Tensor:
        return self._turned_back(self.rounded_keys(stored), 0)

    def decode_values(self, stored: Stored) -> Tensor:
        return self._turned_back(self.rounded_values(stored), 1)

    def rounded_keys(self, stored: Stored) -> Tensor:
        """Return the keys as they have been rounded, rotated: float32."""
        return self.codec.decode(stored["keys"], stored["key_scales"])

    def rounded_values(self, stored: Stored) -> Tensor:
        """Return the values as they have been rounded, rotated: float32."""
        return self.codec.decode(stored["values"], stored["value_scales"])

    def _turned_back(self, vectors: Tensor, which: int) -> Tensor:
        rotation = self.rotations[which]
        back = vectors if rotation is None else rotation.turn_back(vectors)
        return back.to(self.sample[which].dtype)


def make_form(codec: Codec | None, layer: int, keys: Tensor, values: Tensor) -> Form:
    """Make the form of a layer's slots.

    Args:
        layer: index in the model.
        keys, values: like those to store, (batch, kv_heads, tokens, dim).
    """
    return Form(keys, values) if codec is None else CodedForm(codec, layer, keys, values)


def take_stored(stored: Stored, slots: Tensor) -> Stored:
    """Copy what some slots hold.

    Args:
        slots: (batch, kv_heads or 1, count) int64.
    """
    return {name: take(tensor, slots) for name, tensor in stored.items()}


def _behind(stored: Stored, block: Tensor, decode: Callable[[Stored], Tensor]) -> Tensor:
    """Decode slice by slice to where a block follows."""
    kept, new = stored["keys"].shape[2], block.shape[2]
    joined = block.new_empty((*block.shape[:2], kept + new, block.shape[3]))
    for start in range(0, kept, SLICE):
        own = slice(start, min(start + SLICE, kept))
        joined[:, :, own] = decode({name: tensor[:, :, own] for name, tensor in stored.items()})
    joined[:, :, kept:] = block
    return joined


def _turned(vectors: Tensor, rotation: RandomRotation | None) -> Tensor:
    return vectors if rotation is None else rotation.turn(vectors)


def _empty(like: Tensor) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty((1, 1, 0, like.shape[-1]), dtype=like.dtype, device=like.device)
