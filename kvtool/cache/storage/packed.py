"""Keys and values in the form in which they lie in host memory: exact, bf16, or int8 and scales."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(tensor: Tensor, form: str) -> tuple[Tensor, ...]:
    """Bring keys or values into the form in which they are stored.

    Returns:
        One tensor; for int8 numbers and their scales, (.., 1) float32, one per token and head.
    """
    if form == "bf16":
        return (tensor.bfloat16(),)
    if form == "int8":
        scale = tensor.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return (tensor.float() / scale).round().to(torch.int8), scale
    return (tensor,)


def unpack(packed: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Bring them back."""
    if len(packed) == 1:
        return packed[0].to(dtype)
    numbers, scale = packed
    return (numbers * scale).to(dtype)
