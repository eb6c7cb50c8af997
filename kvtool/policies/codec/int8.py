"""Slots of 8 bits: whole numbers from -127 to 127, and a scale for each token and KV head.

The scale is the largest magnitude of the vector over 127, in float16. A key or value takes head_dim
+ 2 bytes, against 2 * head_dim in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.lazy_torch import Tensor
from kvtool.maths.quantise import from_int8, int8_codes
from kvtool.policies.codec.codec import Codec


@dataclass(frozen=True)
class Int8(Codec):
    """Store keys and values as whole numbers of 8 bits."""

    name: ClassVar = "int8"
    paper: ClassVar = "-"
    kernel_form: ClassVar = "int8"

    def encode(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        return int8_codes(numbers)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return from_int8(codes, scales)
