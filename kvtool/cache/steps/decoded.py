"""Keys and values of the slots in use, as policies see them: codes are decoded when looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import torch
from torch import Tensor

from kvtool.cache.storage.form import Form, Stored
from kvtool.cache.storage.layer import SlotLayer

Decode = Callable[[Form, Stored], Tensor]


class Decoded(Sequence[Tensor]):
    """Keys or values of layers in float, a layer at a time, so that no more is held."""

    def __init__(self, layers: Sequence[SlotLayer], decode: Decode) -> None:
        self._layers, self._decode = layers, decode

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            return Decoded(self._layers[index], self._decode)
        slots = self._layers[index].slots
        return self._decode(slots.form, slots.used_stored())


def used_keys(*layers: SlotLayer) -> Sequence[Tensor]:
    """The keys in the slots in use of each layer; none where the policy does not look at them."""
    if not layers[0].policy.ranking.evidence.shows_keys:
        return ()
    return _of_layers(layers, _decode_keys)


def used_values(*layers: SlotLayer) -> Sequence[Tensor]:
    """The values in the slots in use of each layer."""
    return _of_layers(layers, _decode_values)


def _of_layers(layers: Sequence[SlotLayer], decode: Decode) -> Sequence[Tensor]:
    found = Decoded(layers, decode)
    lazy = layers[0].policy.codec is not None and not torch.compiler.is_compiling()
    return found if lazy else tuple(found[i] for i in range(len(layers)))


def _decode_keys(form: Form, stored: Stored) -> Tensor:
    return form.decode_keys(stored)


def _decode_values(form: Form, stored: Stored) -> Tensor:
    return form.decode_values(stored)
