"""Kernels run only where they were right once: on this device, in this dtype, at these sizes.

Before a family of kernels first runs there, it and plain torch (on the CPU, in float32) compute the
same small random problem, with padding, empty slots and several tiles. What raises (it does not
compile, or needs more than the device has) or is off by more than a tolerance is never used: a line
in the log says so, once, and plain torch goes on. Nothing else here makes the host wait for the
device. An access outside the device's memory is beyond this: it ends every CUDA program.
"""

import logging
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kvtool.kernels.checks import Family, Kind, comparisons

# of 1 + the size of a number; a wrong kernel is off by more, and rounding by less
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_FEW = 0.01  # of the weights may fall on the other side of the average


def usable(
    family: Family,
    query: Tensor,
    *,
    group: int,
    value_dim: int = 0,
    softcap: bool = False,
    sinks: bool = False,
    window: bool = False,
    operator: bool = False,
) -> bool:
    """Return whether kernels can run on a query: Triton does on its device, and was right there.

    The first question about a device, a dtype and sizes computes a small problem by the kernels and
    by plain torch. torch.compile is given plain torch, which it fuses itself, or an operator.

    Args:
        query: (..., head_dim).
        group: query heads that share a head of keys.
        value_dim: of the values, if any are read.
        softcap, sinks, window: whether the attention has them.
        operator: whether the kernels are asked as an operator of torch in a compiled step.
    """
    if not _can_run(query) or (torch.compiler.is_compiling() and not operator):
        return False
    of_device = query.device, query.dtype, query.shape[-1]
    return _right(family, *of_device, value_dim, group, softcap, sinks, window)


def _can_run(query: Tensor) -> bool:
    """Return whether Triton's kernels know such a query; they have no gradients."""
    return query.is_cuda and query.dtype in TOLERANCE and not query.requires_grad


def _right(family: Family, device: torch.device, dtype: torch.dtype, *numbers: Any) -> bool:
    return _installed() and trusted(Kind(family, device, dtype, *numbers))


# asked once as a graph is made; `torch.compiler.assume_constant_result` would import the compiler
vars(_right)["_dynamo_marked_constant"] = True


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


@cache
def trusted(kind: Kind) -> bool:
    """Return whether the kernels of a kind agree with plain torch; computed once."""
    try:
        with torch.no_grad():
            wrong = _disagreement(kind)
    except Exception as error:  # whatever it is, plain torch can go on
        lines = str(error).strip().splitlines()
        wrong = f"{type(error).__name__}: {lines[-1].strip()[:200]}" if lines else repr(error)
    if wrong is None:
        return True
    dims = kind.head_dim if not kind.value_dim else f"{kind.head_dim}/{kind.value_dim}"
    logging.getLogger(__name__).warning(
        "kvtool: no kernels for %s (%s, %s) on %s, %s instead: %s",
        *(kind.family, str(kind.dtype).removeprefix("torch."), dims, kind.device),
        *("Triton" if kind.family is Family.CAUSAL else "plain torch", wrong),
    )
    return False


def _disagreement(kind: Kind) -> str | None:
    for name, found, expected in comparisons(kind):
        difference = (found - expected).abs().float()
        if expected.is_floating_point():  # integers are equal, or off by one at least
            difference /= 1 + expected.abs()
        off = difference.mean() if name == "above_average" else difference.max()
        allowed = _FEW if name == "above_average" else TOLERANCE[kind.dtype]
        if not off <= allowed:  # nor if it is not a number
            return f"{name} is off by {off:.2g}"
    return None
