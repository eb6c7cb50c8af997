"""What decides which machine code of the kernels runs."""

from dataclasses import dataclass
from enum import Enum

import torch


class Family(str, Enum):
    """Kernels that are checked, and used or not, together."""

    __str__ = str.__str__

    ROWS = "attention of a block"
    SLOTS = "attention of a decoded token"
    PAGES = "page bounds"
    PRODUCTS = "products with chosen rows"


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
