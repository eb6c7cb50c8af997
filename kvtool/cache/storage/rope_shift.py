"""How a layer's keys turn by position, where they stand at their places among the kept tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvtool.cache.storage.part import Part
from kvtool.maths.rope import Rotation
from kvtool.policies.numbers import SHIFT


class RopeShift(Part):
    """The rotation of a layer's keys, and the longest shift that there has been.

    Attributes:
        rotation: None where keys do not depend on the position.
        max_shift: no key has to be shifted by more positions than this.
    """

    name = "rope_shift"

    def __init__(self, rotation: Rotation | None, max_shift: int = 0) -> None:
        self.rotation, self.max_shift = rotation, max_shift

    def copy(self) -> RopeShift:
        """The same for a part of the layer's heads."""
        return RopeShift(self.rotation, self.max_shift)

    def reach(self, positions: int) -> int:
        """Note a shift that may be so long, and return the longest."""
        self.max_shift = max(self.max_shift, positions)
        return self.max_shift

    def clear(self) -> None:
        self.max_shift = 0

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        shifts = tensors.get(f"state.{SHIFT}")
        if shifts is not None:
            self.max_shift = int(shifts.abs().max())
