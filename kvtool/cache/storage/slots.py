"""What slots hold as it is handed on, and how heads that hold theirs apart look to a layer."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvtool.cache.storage.slot_form import Form, Stored


class Slots(NamedTuple):
    """What slots hold, keys and values as they are stored; mostly copies in ascending position."""

    stored: Stored
    positions: Tensor
    state: dict[str, Tensor]


class Ragged(Protocol):
    """Heads of unequal counts, as a layer sees them: `kvtool.cache.storage.ragged`.

    Attributes:
        buckets: slot layers, each of the heads that hold nearly the same count.
    """

    buckets: list[Any]

    def stored_positions(self) -> Tensor: ...

    def sorted_slots(self) -> Slots: ...

    def split_again(self, layer: Any) -> None: ...

    def whole_form(self, form: Form) -> Form: ...


def ascending(positions: Tensor) -> Tensor:
    """Indices of slots in ascending position, empty ones (-1) last."""
    last = torch.iinfo(positions.dtype).max
    return positions.masked_fill(positions < 0, last).argsort(-1)
