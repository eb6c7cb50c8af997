"""Kind of a kernel: all that decides which machine code runs."""

from dataclasses import dataclass
from enum import Enum

import torch


class Family(str, Enum):
    """Kernels that are checked, and used or not, together."""

    __str__ = str.__str__

    ROWS = "attention of a block"
    SLOTS = "attention of a decoded token"
    INT8 = "attention of a decoded token to int8 slots"
    FP8 = "attention of a decoded token to fp8 slots"
    INT4 = "attention of a decoded token to int4 slots"
    K8V4 = "attention of a decoded token to int8 keys and int4 values"
    K4V8 = "attention of a decoded token to int4 keys and int8 values"
    PAGES = "page bounds"
    PRODUCTS = "products with chosen rows"


CODES = {
    ("int8", "int8"): Family.INT8,
    ("fp8", "fp8"): Family.FP8,
    ("int4", "int4"): Family.INT4,
    ("int8", "int4"): Family.K8V4,
    ("int4", "int8"): Family.K4V8,
}
"""The family that attends to quantised slots, by the forms of the codes of keys and of values."""


@dataclass(frozen=True)
class Kind:
    """What decides which machine code runs, and whether it fits into a device."""

    family: Family
    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    group: int
    softcap: bool = False
    sinks: bool = False
    window: bool = False
