"""What a feature keeps beside the slots of a layer: one object, with the same methods for all.

Reset, beams, files, bytes and going back are loops over a layer's parts, so that a new feature is
one class here and one line in `kvtool.cache.layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


class HasParts(Protocol):
    """A layer, as far as its parts can be found."""

    parts: dict[str, Part]


class Part:
    """What one feature keeps beside the slots; empty until the feature has something to keep.

    Attributes:
        name: by which a layer knows it.
        joins_decode: whether it has a say while a decoded token is written and attended.
    """

    name: ClassVar[str]
    joins_decode: ClassVar[bool] = True

    @classmethod
    def of(cls, layer: HasParts) -> Self | None:
        """Return the part of this kind that a layer has, None if it has none."""
        part = layer.parts.get(cls.name)
        return part if isinstance(part, cls) else None

    def begin(self, batch: int, kv_heads: int, device: torch.device) -> None:
        """Prepare for the first tokens."""

    def clear(self) -> None:
        """Forget the text."""

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        """Let everything follow the batch entries, by what is done to a tensor of theirs."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what a file holds of it, by its names in the file."""
        return {}

    def shapes(self, batch: int, kv_heads: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shape and dtype of what a file must hold, where that is all there is to say.

        What has limits of its own is checked by `kvtool.cache.files.checks`.
        """
        return {}

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Take back what `tensors` gave, from all tensors of the layer."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return 0


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the numbers in some tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)
