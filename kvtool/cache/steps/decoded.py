"""Keys and values of the slots in use, as policies see them: codes are decoded when looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import torch
from torch import Tensor

from kvtool.cache.storage.layer import SlotLayer
from kvtool.cache.storage.slot_form import Form, Stored

Dequantise = Callable[[Form, Stored], Tensor]


class Dequantised(Sequence[Tensor]):
    """Keys or values of layers in float, a layer at a time, so that no more is held."""

    def __init__(self, layers: Sequence[SlotLayer], dequantise: Dequantise) -> None:
        self._layers, self._dequantise = layers, dequantise

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            return Dequantised(self._layers[index], self._dequantise)
        slots = self._layers[index].slots
        return self._dequantise(slots.form, slots.used_stored())


def used_keys(*layers: SlotLayer) -> Sequence[Tensor]:
    """The keys in the slots in use of each layer; none where the policy does not look at them."""
    if not layers[0].policy.ranking.evidence.shows_keys:
        return ()
    return _of_layers(layers, _dequantise_keys)


def used_values(*layers: SlotLayer) -> Sequence[Tensor]:
    """The values in the slots in use of each layer."""
    return _of_layers(layers, _dequantise_values)


def _of_layers(layers: Sequence[SlotLayer], dequantise: Dequantise) -> Sequence[Tensor]:
    found = Dequantised(layers, dequantise)
    lazy = layers[0].policy.codec is not None and not torch.compiler.is_compiling()
    return found if lazy else tuple(found[i] for i in range(len(layers)))


def _dequantise_keys(form: Form, stored: Stored) -> Tensor:
    return form.dequantise_keys(stored)


def _dequantise_values(form: Form, stored: Stored) -> Tensor:
    return form.dequantise_values(stored)
