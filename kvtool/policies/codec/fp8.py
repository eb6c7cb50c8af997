"""Slots of 8-bit floats, as serving engines store them: e4m3, and a scale for each token and head.

The scale is the largest magnitude of the vector over 448, in float16. A key or value takes head_dim
+ 2 bytes. Others, such as vLLM, have one scale for a whole layer, or none. One for each vector
costs 2 bytes and needs no calibration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.errors import UsageError
from kvtool.lazy_torch import Tensor, torch
from kvtool.maths.quantise import fp8_codes, from_fp8
from kvtool.policies.codec.codec import Codec


@dataclass(frozen=True)
class FP8(Codec):
    """Store keys and values as floats of 8 bits (e4m3)."""

    name: ClassVar = "fp8"
    paper: ClassVar = "https://arxiv.org/abs/2209.05433"
    kernel_form: ClassVar = "fp8"

    def check_device(self, device: str) -> None:
        try:
            fp8_codes(torch.zeros(1, device=device))
        except (AttributeError, TypeError, RuntimeError):
            raise UsageError(
                f"`fp8` needs float8_e4m3fn, which torch {torch.__version__} lacks on {device}",
                hint="take int8, which is as large",
            ) from None

    def encode(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        return fp8_codes(numbers)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return from_fp8(codes, scales)
