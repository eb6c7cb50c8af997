"""Attention that also counts what policies need to know, in Triton, for CUDA devices.

Elsewhere, and without Triton, plain torch computes the same: `kvtool.cache.kernels`. The modules
beside this one import Triton, so they are imported only once `usable` has said yes; all but
`tables`, which asks, and `twins`, which is plain torch.
"""

from enum import StrEnum
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Family(StrEnum):
    """Kernels that are checked, and used or not, together."""

    ROWS = "attention of a block"
    SLOTS = "attention of a decoded token"
    PAGES = "page bounds"
    PRODUCTS = "products with chosen rows"


def usable(
    family: Family,
    query: Tensor,
    *,
    group: int,
    value_dim: int = 0,
    softcap: bool = False,
    sinks: bool = False,
    window: bool = False,
) -> bool:
    """Whether kernels can run on a query: Triton runs on its device, and has been right there.

    The first question about a device, a dtype and sizes computes a small problem by the kernels and
    by plain torch. torch.compile is always given plain torch, which it fuses itself.

    Args:
        query: (..., head_dim).
        group: query heads that share a head of keys.
        value_dim: of the values, if any are read.
        softcap, sinks, window: whether the attention has them.
    """
    if torch.compiler.is_compiling() or not _can_run(query):
        return False
    from kvtool.kernels.trust import Kind, trusted

    of_device = query.device, query.dtype, query.shape[-1]
    return trusted(Kind(family, *of_device, value_dim, group, softcap, sinks, window))


def _can_run(query: Tensor) -> bool:
    """Whether Triton can be asked at all; its kernels have no gradients."""
    known = query.is_cuda and query.dtype in _DTYPES
    return known and not query.requires_grad and _installed()


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
