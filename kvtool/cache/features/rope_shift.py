"""How a layer's keys turn by position, where they stand at their places among the kept tokens."""

from __future__ import annotations

from kvtool.cache.slots.part import Part
from kvtool.maths.rotation import Rotation


class RopeShift(Part):
    """The rotation of a layer's keys.

    Attributes:
        rotation: None where keys do not depend on the position.
    """

    name = "rope_shift"

    def __init__(self, rotation: Rotation | None) -> None:
        self.rotation = rotation

    def copy(self) -> RopeShift:
        """The same for a part of the layer's heads."""
        return RopeShift(self.rotation)
