"""Read a state of llama.cpp: written from its layout, without the writer's code."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

FLOATS = {0: np.float32, 1: np.float16}
BLOCKS = {2: 18, 8: 34}  # bytes of 32 numbers: q4_0 and q8_0


@dataclass
class State:
    """A state as it is stored.

    Attributes:
        keys, values: of each layer, (slots, kv_heads * head_dim) float32.
    """

    version: int
    ids: list[int]
    positions: list[tuple[int, int, int]]
    transposed: int
    turned: tuple[int, int]
    streams: int
    keys: list[np.ndarray]
    values: list[np.ndarray]


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> tuple:
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def raw(self, count: int) -> np.ndarray:
        self.at += count
        return np.frombuffer(self.data, np.uint8, count, self.at - count)


def dequantise(raw: np.ndarray, kind: int) -> np.ndarray:
    """Undo q4_0 and q8_0: (rows, bytes) to (rows, numbers)."""
    blocks = raw.reshape(len(raw), -1, BLOCKS[kind])
    scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    codes = blocks[..., 2:]
    if kind == 8:
        numbers = codes.copy().view(np.int8).astype(np.float32)
    else:
        numbers = np.concatenate([codes & 15, codes >> 4], -1).astype(np.float32) - 8
    return (numbers * scale).reshape(len(raw), -1)


def read(data: bytes) -> State:
    source = _Bytes(data)
    magic, version, count = source.take("3I")
    assert magic == 0x67677371
    ids = list(source.take(f"{count}i"))
    streams, cells = source.take("2I")
    positions = [source.take("iIi") for _ in range(cells)]
    transposed, layers = source.take("2I")
    turned = source.take("2I") if version >= 4 else (0, 0)

    def rows() -> np.ndarray:
        kind, size = source.take("iQ")
        raw = source.raw(size * cells).reshape(cells, size)
        return dequantise(raw, kind) if kind in BLOCKS else raw.view(FLOATS[kind]).astype("f4")

    def columns() -> np.ndarray:
        kind, size, width = source.take("i2I")
        raw = source.raw(size * width * cells)
        return raw.view(FLOATS[kind]).reshape(width, cells).T.astype(np.float32)

    keys = [rows() for _ in range(layers)]
    values = [columns() if transposed else rows() for _ in range(layers)]
    assert source.take(f"{streams - 1}I") == (0,) * (streams - 1)
    assert source.at == len(data)
    return State(version, ids, positions, transposed, turned, streams, keys, values)


def heads(rows: np.ndarray, count: int) -> np.ndarray:
    """(slots, kv_heads * head_dim) to (kv_heads, slots, head_dim)."""
    return rows.reshape(len(rows), count, -1).swapaxes(0, 1)


def halves(keys: np.ndarray) -> np.ndarray:
    """Undo pairs of neighbours."""
    return np.concatenate([keys[..., 0::2], keys[..., 1::2]], -1)


def unmixed(rows: np.ndarray, width: int) -> np.ndarray:
    """Undo the Hadamard rotation, which is its own inverse."""
    if not width:
        return rows
    matrix = np.array([[(-1) ** (i & j).bit_count() for i in range(width)] for j in range(width)])
    return (rows.reshape(len(rows), -1, width) @ (matrix / width**0.5)).reshape(rows.shape)
