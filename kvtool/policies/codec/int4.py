"""Slots of 4 bits: rotated vectors as whole numbers from -7 to 7, a scale for each 32 channels.

A few channels of keys are far larger than the others, and would take the scale of all. Random signs
and a Hadamard matrix spread them over all channels first, as QuaRot does (Ashkboos et al., 2024,
https://arxiv.org/abs/2404.00456). Since that is a rotation, queries are rotated in place of keys,
and the output is rotated back once. Two codes lie in a byte: a key or value takes head_dim / 2 +
head_dim / 16 bytes.

Differences from the paper: the signs follow from the layer's index, no weights of the model change,
and the Hadamard matrix is of the largest power of two that divides the head size.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

from kvtool.errors import UsageError
from kvtool.lazy_torch import Tensor, torch
from kvtool.maths.quantise import GROUP, RandomRotation, from_int4, hadamard, int4_codes
from kvtool.policies.codec.codec import Codec


@dataclass(frozen=True)
class Int4(Codec):
    """Store keys and values as rotated whole numbers of 4 bits.

    Args:
        rotate: whether vectors are rotated before they are rounded.
    """

    rotate: bool = True

    name: ClassVar = "int4"
    paper: ClassVar = "https://arxiv.org/abs/2404.00456"
    code_bits: ClassVar = 4
    kernel_form: ClassVar = "int4"

    def check_dim(self, dim: int) -> None:
        if dim % GROUP:
            raise UsageError(
                f"4 bits share scales among {GROUP} channels, and a head of this model has {dim}",
                hint="take int8 or fp8, which take any head size",
            )

    def scales(self, dim: int) -> int:
        return dim // GROUP

    def rotation(self, layer: int, dim: int, device: torch.device) -> RandomRotation | None:
        if not self.rotate:
            return None
        return RandomRotation(_signs(layer, dim).to(device), hadamard(dim, device))

    def encode(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        return int4_codes(numbers)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return from_int4(codes, scales)


def _signs(layer: int, dim: int) -> Tensor:
    """Draw the signs of a layer, the same for ever, since files depend on them: (dim,) 1 or -1."""
    drawn = hashlib.shake_256(f"int4 rotation of layer {layer}".encode()).digest(dim)
    return torch.tensor([1 - 2 * (byte & 1) for byte in drawn], dtype=torch.float32)
