"""Attention that also counts what policies need to know, in Triton, for CUDA devices.

Elsewhere, and without Triton, plain torch computes the same: `kvtool.cache.kernels`. The modules
beside this one import Triton, so they are imported only once `usable` has said yes.
"""

from functools import cache
from importlib.util import find_spec

from torch import Tensor


def usable(tensor: Tensor) -> bool:
    """Whether the kernels can run on a tensor: it is on a CUDA device, and Triton is installed."""
    return tensor.is_cuda and _installed()


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
