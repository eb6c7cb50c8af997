"""The tensors of a cache file, taken one by one and held against what they must be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvtool.cache.files.checks import bad_file
from kvtool.errors import KvtoolError


class FileTensors:
    """The tensors of a file: one after the other is taken off, what is left is too many.

    Attributes:
        path: of the file.
        left: what has not been taken yet.
        seen: tokens that the cache has seen, padding included.
        batch: its batch entries.
        lengths: (batch,) tokens of each; None: all alike.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], seen: int, batch: int) -> None:
        self.path, self.left = path, dict(tensors)
        self.seen, self.batch = seen, batch
        self.lengths: Tensor | None = None
        if "lengths" in self.left:
            self.lengths = self.take("lengths", (batch,), torch.int64, 1, seen)

    def bad(self, name: str, what: str) -> KvtoolError:
        return bad_file(self.path, f"`{name}` {what}")

    def take(
        self,
        name: str,
        shape: tuple[int | None, ...],
        dtype: torch.dtype | tuple[torch.dtype, ...],
        low: float | None = None,
        high: float | None = None,
        *,
        unknown: bool = False,
    ) -> Tensor:
        """Take a tensor off the list.

        Args:
            shape: None for a size that is free.
            dtype: one or several that it may be of.
            low, high: what its numbers may be, both included.
            unknown: whether numbers may be minus infinity.
        """
        tensor = self.left.pop(name, None)
        if tensor is None:
            raise self.bad(name, "is missing")
        fits = len(shape) == tensor.dim() and all(
            want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
        )
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        if tensor.dtype not in dtypes or not fits:
            sizes = ["any" if size is None else size for size in shape]
            found, expected = (tensor.dtype, list(tensor.shape)), (dtypes[0], sizes)
            message = "is {} {}, not {} {}".format(*found, *expected)
            raise self.bad(name, message.replace("torch.", "").replace("'", ""))
        if tensor.dtype.is_floating_point:
            sound = tensor.isfinite() | (tensor == float("-inf")) if unknown else tensor.isfinite()
            if not sound.all():
                raise self.bad(name, "holds numbers that are not finite")
        if tensor.numel() and (
            (low is not None and tensor.min() < low) or (high is not None and tensor.max() > high)
        ):
            raise self.bad(name, "holds numbers out of their range")
        return tensor

    def kept(self, layer: int) -> int | None:
        """Slots of a layer."""
        positions = self.left.get(f"layer.{layer}.positions")
        return positions.shape[-1] if positions is not None and positions.dim() == 3 else None
