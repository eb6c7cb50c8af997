"""The form in which keys and values lie in slots: as they are, or as codes beside scales.

What is stored is a few tensors by name, (batch, kv_heads, slots, ..) each, which are moved, copied
and counted alike. Only a form knows what is in them.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvtool.errors import KvtoolError
from kvtool.maths.quantise import (
    FEWEST,
    ChannelRanges,
    RandomRotation,
    are_apart,
    are_varied,
    channel_ranges,
    lost_share,
    with_signs,
)
from kvtool.maths.selection import take
from kvtool.policies.codec.codec import Codec

if TYPE_CHECKING:
    pass

Stored = dict[str, Tensor]

RANGES = ("key_centre", "key_exponent")
"""What a file calls the `ChannelRanges` of a layer."""

SLICE = 1024
"""Slots that are decoded at a time."""

_LOST = 0.7  # share of what most channels say that rounding may lose; measured: answers hold below
_MOST = 256  # tokens of the first block by which it is judged


class Form:
    """Keys and values as they are.

    Attributes:
        codec: that makes the codes; None: there are none.
    """

    codec: Codec | None = None

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Take in what is like the keys and values to store, (batch, kv_heads, tokens, dim)."""
        self.sample = tuple(_empty(tensor) for tensor in (keys, values))

    def __deepcopy__(self, memo: dict) -> Form:
        return self  # nothing in it ever changes

    @property
    def full_token_bytes(self) -> int:
        """Bytes of the key and value of one token in one KV head, in the dtype of the model."""
        return sum(tensor.shape[-1] * tensor.element_size() for tensor in self.sample)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What it holds of texts."""
        return ()

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds of texts."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def fitted(self, layer: int, keys: Tensor, values: Tensor, new: Tensor, empty: Tensor) -> Form:
        """Return the form for texts whose first block this is.

        Args:
            layer: index in the model.
            keys, values: (batch, kv_heads, tokens, dim).
            new: (batch or 1, tokens) positions, -1 = padding.
            empty: bool (batch or 1,), whether an entry has nothing stored.

        Raises:
            KvtoolError: a codec cannot store these.
        """
        return self

    def reindexed(self, change: Callable[[Tensor], Tensor]) -> Form:
        """Return the form of other batch entries."""
        return self

    def quantise(self, keys: Tensor, values: Tensor) -> Stored:
        """Return what is stored of keys and values."""
        return {"keys": keys, "values": values}

    def dequantise(self, stored: Stored) -> tuple[Tensor, Tensor]:
        """Return keys and values in the dtype of the model."""
        return stored["keys"], stored["values"]

    def with_values(self, stored: Stored, values: Tensor) -> Stored:
        """Return what is stored with other values beside the same keys."""
        return {**stored, "values": values}

    def join(self, stored: Stored, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is stored and a block behind it, in the dtype of the model."""
        return torch.cat([stored["keys"], keys], 2), torch.cat([stored["values"], values], 2)

    def dequantise_keys(self, stored: Stored) -> Tensor:
        """Return the keys alone."""
        return stored["keys"]

    def dequantise_values(self, stored: Stored) -> Tensor:
        """Return the values alone."""
        return stored["values"]


class CodedForm(Form):
    """Codes and scales of keys and values.

    Attributes:
        sides: the codecs of keys and of values.
        rotations: of keys and of values, before they are rounded; None: there are none.
        ranges: of the channels of keys, by the first block of each text.
        shifted: whether any of these is known.
    """

    codec: Codec

    def __init__(self, codec: Codec, layer: int, keys: Tensor, values: Tensor) -> None:
        """Prepare to store what is like these.

        Args:
            layer: index in the model.
        """
        super().__init__(keys, values)
        self.codec, self.sides = codec, codec.sides()
        batch, kv_heads, _, dim = keys.shape
        with torch.inference_mode(False):
            self.rotations = tuple(
                side.rotation(layer, tensor.shape[-1], tensor.device)
                for side, tensor in zip(self.sides, (keys, values), strict=True)
            )
            self.ranges = ChannelRanges.neutral(batch, kv_heads, dim, keys.device)
        self.shifted = False

    @property
    def kernel_forms(self) -> tuple[str, str]:
        """The forms in which kernels read the codes of keys and of values; empty: they do not."""
        of_keys, of_values = self.sides
        return of_keys.kernel_form or "", of_values.kernel_form or ""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.ranges)

    def with_ranges(self, ranges: ChannelRanges, *, shifted: bool) -> CodedForm:
        """Return the same form for keys whose channels lie elsewhere."""
        form = copy.copy(self)
        with torch.inference_mode(False):
            own = ChannelRanges(*(tensor.clone() for tensor in ranges))
        vars(form).update(ranges=own, shifted=shifted)
        return form

    def __deepcopy__(self, memo: dict) -> CodedForm:
        return self.with_ranges(self.ranges, shifted=self.shifted)  # which are written in place

    @torch.no_grad()
    def fitted(self, layer: int, keys: Tensor, values: Tensor, new: Tensor, empty: Tensor) -> Form:
        valid = new >= 0
        varied, mask = are_varied(values, valid), empty[:, None, None, None]
        found = (torch.where(varied, each, 0) for each in channel_ranges(keys, valid))
        pairs = zip(found, self.ranges, strict=True)
        ranges = ChannelRanges(*(torch.where(mask, own, old) for own, old in pairs))
        enough = int(valid.sum(1).max()) >= FEWEST
        form = self.with_ranges(ranges, shifted=enough or self.shifted)
        if enough:
            form._check(layer, keys[:, :, -_MOST:].detach(), values[:, :, -_MOST:].detach())
        return form

    def reindexed(self, change: Callable[[Tensor], Tensor]) -> Form:
        ranges = ChannelRanges(*(change(tensor) for tensor in self.ranges))
        if all(map(operator.is_, ranges, self.ranges)):
            return self
        return self.with_ranges(ranges, shifted=self.shifted)

    def _check(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Refuse keys and values of which rounding would leave the largest channels alone."""
        decoded = self.dequantise(self.quantise(keys, values))
        for kind, numbers, rounded in zip(("keys", "values"), (keys, values), decoded, strict=True):
            lost = lost_share(numbers, rounded)
            if lost > _LOST:
                raise KvtoolError(
                    f"`{self.codec.name}` cannot store the {kind} of layer {layer}: a few channels "
                    "are so much larger than the others that rounding would lose the others",
                    hint="do without a codec, or try fp8, which rounds each number by its own size",
                )

    def quantise(self, keys: Tensor, values: Tensor) -> Stored:
        centred = None
        if self.shifted:
            keys, centred = self.ranges.narrow(keys, choose=self._signs)
        of_keys, of_values = self.sides
        if of_keys is of_values and keys.shape == values.shape:  # both at once, rotated alike
            codes, scales = of_keys.encode(_rotated(torch.stack([keys, values]), self.rotations[0]))
            (key_codes, value_codes), (key_scales, value_scales) = codes.unbind(), scales.unbind()
        else:
            key_codes, key_scales = of_keys.encode(_rotated(keys, self.rotations[0]))
            value_codes, value_scales = of_values.encode(_rotated(values, self.rotations[1]))
        return {
            "keys": key_codes,
            "values": value_codes,
            "key_scales": key_scales if centred is None else with_signs(key_scales, centred),
            "value_scales": value_scales,
        }

    def dequantise(self, stored: Stored) -> tuple[Tensor, Tensor]:
        return self.dequantise_keys(stored), self.dequantise_values(stored)

    def with_values(self, stored: Stored, values: Tensor) -> Stored:
        codes, scales = self.sides[1].encode(_rotated(values.float(), self.rotations[1]))
        return {**stored, "values": codes, "value_scales": scales}

    def join(self, stored: Stored, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return (
            _behind(stored, keys, self.dequantise_keys),
            _behind(stored, values, self.dequantise_values),
        )

    def dequantise_keys(self, stored: Stored) -> Tensor:
        keys = _rotated_back(self.rounded_keys(stored), self.rotations[0])
        if self.shifted:
            keys = self.ranges.widen(keys, self.apart(stored))
        return keys.to(self.sample[0].dtype)

    @property
    def _signs(self) -> bool:
        """Whether signs of scales say which keys are centred; a codec of one's own may use them."""
        return self.sides[0].kernel_form is not None

    def apart(self, stored: Stored) -> Tensor | None:
        """Mark the keys that are not centred: bool (batch, kv_heads, slots, 1); None: all are."""
        return are_apart(stored["key_scales"]) if self._signs else None

    def rotated_query(self, query: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what is multiplied with the rounded keys in place of a query, and what is missing.

        Args:
            query: (batch, kv_heads, group, 1, dim) float32.

        Returns:
            The same shape, and (batch, kv_heads, group, 1, 1) to add to the products with keys
            that are centred; None: 0.
        """
        constant, rotation = None, self.rotations[0]
        if self.shifted:
            query, constant = self.ranges.of_query(query)
        return (query if rotation is None else rotation.rotate(query)), constant

    def dequantise_values(self, stored: Stored) -> Tensor:
        values = _rotated_back(self.rounded_values(stored), self.rotations[1])
        return values.to(self.sample[1].dtype)

    def rounded_keys(self, stored: Stored) -> Tensor:
        """Return the keys as they have been rounded, narrowed and rotated: float32."""
        return self.sides[0].decode(stored["keys"], stored["key_scales"])

    def rounded_values(self, stored: Stored) -> Tensor:
        """Return the values as they have been rounded, rotated: float32."""
        return self.sides[1].decode(stored["values"], stored["value_scales"])


def make_form(codec: Codec | None, layer: int, keys: Tensor, values: Tensor) -> Form:
    """Make the form of slots of the layer `layer` of the model, for keys and values like these."""
    return Form(keys, values) if codec is None else CodedForm(codec, layer, keys, values)


def take_stored(stored: Stored, slots: Tensor) -> Stored:
    """Copy what some slots hold.

    Args:
        slots: (batch, kv_heads or 1, count) int64.
    """
    return {name: take(tensor, slots) for name, tensor in stored.items()}


def _behind(stored: Stored, block: Tensor, dequantise: Callable[[Stored], Tensor]) -> Tensor:
    """Decode slice by slice to where a block follows."""
    kept, new = stored["keys"].shape[2], block.shape[2]
    joined = block.new_empty((*block.shape[:2], kept + new, block.shape[3]))
    for start in range(0, kept, SLICE):
        own = slice(start, min(start + SLICE, kept))
        joined[:, :, own] = dequantise({name: tensor[:, :, own] for name, tensor in stored.items()})
    joined[:, :, kept:] = block
    return joined


def _rotated(vectors: Tensor, rotation: RandomRotation | None) -> Tensor:
    return vectors if rotation is None else rotation.rotate(vectors)


def _rotated_back(vectors: Tensor, rotation: RandomRotation | None) -> Tensor:
    return vectors if rotation is None else rotation.rotate_back(vectors)


def _empty(like: Tensor) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty((1, 1, 0, like.shape[-1]), dtype=like.dtype, device=like.device)
