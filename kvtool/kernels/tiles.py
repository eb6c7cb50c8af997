"""Tiles of queries and keys, as the kernels share them: how they are read, which are visible."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.driver import driver

from kvtool.maths.columns import COLUMNS

LOG2_E = 1.4426950408889634
"""Turns exponents of e into exponents of 2, which GPUs compute."""

_TALL = 160 * 1024  # bytes that a program needs for three tall tiles of halves
_ROOM = 16384  # bytes of one tile of halves


class Tiling(NamedTuple):
    """How a kernel of prompts cuts its work.

    Attributes:
        rows, keys: queries and keys of a tile.
        warps: that share a tile.
        stages: tiles of keys that are read ahead, the one at work included.
    """

    rows: int
    keys: int
    warps: int
    stages: int


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of memory that the threads of a program can share; 0 where there is none."""
    if device.type != "cuda":
        return 0
    return driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def prompt_tiling(key: Tensor, value: Tensor) -> Tiling:
    """Choose the tiles of a prompt's attention: tall ones where they fit, which are faster."""
    widest = max(width(key.shape[-1]), width(value.shape[-1]))
    halves = key.element_size() == 2
    if halves and 64 * 2 * widest <= _ROOM and shared_memory(key.device) >= _TALL:
        return Tiling(128, 64, 8, 3)
    edge = tile_edge(key, value)
    return Tiling(edge, edge, 4, 2)


def width(dim: int) -> int:
    """Return the columns of a tile that holds `dim`: a power of two that a matrix unit takes."""
    return max(16, triton.next_power_of_2(dim))


def tile_edge(*operands: Tensor, rows: int = 0) -> int:
    """Count the rows of a tile: few enough for a GPU's shared memory to hold all operands.

    Some are read ahead: the memory holds three tiles of each. Products of float32 in full precision
    take several times the memory of halves.

    Args:
        rows: of the tile that they are multiplied with, where it may be tall.
    """
    size = operands[0].element_size()
    room = _ROOM if size == 2 else _ROOM // 2
    widest = max(*(width(tensor.shape[-1]) for tensor in operands), 2 * rows)
    return min(64, max(16, room // (size * widest)))


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor, its last axis without gaps."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def strided(tensor: Tensor | None) -> tuple[Tensor | int, ...] | None:
    """Lay a tensor out for a kernel: itself, then the strides of all axes but the last, dense one.

    A kernel gets None for no tensor.
    """
    if tensor is None:
        return None
    tensor = dense(tensor)
    return tensor, *tensor.stride()[:-1]


def lay_out_sums(sums: dict[str, Tensor]) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """Lay sums out for a kernel: one of each of `COLUMNS`, or None, and the strides of them all."""
    (stride,) = {total.stride() for total in sums.values()} or {(0, 0, 1)}  # alike, or this raises
    return tuple(sums.get(name) for name in COLUMNS), stride[:2]


@triton.jit
def of_head(tensor, batch, head):
    """Return where a head of a batch entry begins in what `strided` has laid out."""
    return tensor[0] + batch * tensor[1] + head.to(tl.int64) * tensor[2]


@triton.jit
def load_tile(base, rows, stride, limit, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows of a matrix, 0 beyond its last row and column."""
    columns = tl.arange(0, WIDTH)
    inside = (rows < limit)[:, None] & (columns < DIM)[None, :]
    places = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(base + places, mask=inside, other=0.0)


@triton.jit
def add_to(base, places, numbers, there):
    """Add numbers to a row in memory, where it is there, and return the sums."""
    sums = tl.load(base + places, mask=there, other=0.0) + numbers
    tl.store(base + places, sums, mask=there)
    return sums


@triton.jit
def logits_of(query, key, scale, softcap):
    """Compute scaled dot products of two tiles in float32, soft-capped where the model does so."""
    logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if softcap is not None:
        logits = softcap * (1 - 2 / (tl.exp(2 * logits / softcap) + 1))  # softcap * tanh
    return logits


@triton.jit
def softmax_step(logits, highest, total):
    """Add a tile of logits to a running softmax of each row.

    Returns the new maximum, the new sum of exponentials, the tile's exponentials, and the factor
    that brings earlier ones down to the new maximum.
    """
    top = tl.maximum(highest, tl.max(logits, 1))
    finite = tl.where(top == float("-inf"), 0.0, top)  # nothing visible so far
    weights = tl.exp(logits - finite[:, None])
    shrink = tl.exp(highest - finite)
    return top, total * shrink + tl.sum(weights, 1), weights, shrink


@triton.jit
def visible_tile(query_positions, key_positions, window):
    """Mark the keys that each query may see, as `kvtool.maths.attention.visible_keys` does."""
    query = query_positions[:, None]
    key = key_positions[None, :]
    visible = (key >= 0) & (key <= query)
    if window is not None:
        visible = visible & (key > query - window)
    return visible | (query < 0)
