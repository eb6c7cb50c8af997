"""Write a sequence state of llama.cpp, as `llama_state_seq_save_file` does it.

All numbers are little endian. A state is: magic, version and the ids of a prompt; a position for
each cell; the keys of all layers, the values of all layers. A row holds the KV heads of one cell.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from kvtool.errors import UsageError

MAGIC, HEAD = 0x67677371, struct.Struct("<3I")
VERSIONS = ("2", "3", "4")
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
"""Numbers of ggml's types."""

NEIGHBOURS = ("granite", "llama", "mistral", "olmo", "smollm3")
"""Models in halves whose keys llama.cpp's converter puts into pairs of neighbours."""

HALVES = (
    *("gemma", "gpt_neox", "olmo2", "phi", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("stablelm", "starcoder2"),
)
"""Models whose keys it leaves in halves."""

_BLOCK, _TURNED = 32, 64  # numbers that share a scale; the least that a rotation mixes


def refuse_family(family: str) -> None:
    """Refuse a model of which it is not known how llama.cpp pairs its keys: `UsageError`."""
    if family not in NEIGHBOURS + HALVES:
        known = ", ".join(sorted(NEIGHBOURS + HALVES))
        reason = f"how llama.cpp lays out the keys of `{family}` is not known here"
        raise UsageError(reason, hint=f"of {known}")


@dataclass(frozen=True)
class Layout:
    """How a build of llama.cpp, and a context of it, lay a state out; others are a `UsageError`.

    Attributes:
        version: of the state; each build takes one.
        type: of keys and values, by ggml's name.
        transposed: whether values are, which they are without flash attention.
        streams: 1 where sequences share their cells, else the number of sequences.
    """

    version: str = VERSIONS[-1]
    type: str = "f16"
    transposed: bool = False
    streams: int = 1

    def __post_init__(self) -> None:
        if self.version not in VERSIONS:
            reason = f"states of llama.cpp are of version {', '.join(VERSIONS)}, not {self.version}"
            raise UsageError(reason, hint="the log of a failed restore says which a build takes")
        if self.quantised and self.version < "4":
            reason = f"states before version 4 do not say how their {self.type} codes were made"
            raise UsageError(reason, hint="--type f16, or --engine-version 4")
        if self.quantised and self.transposed:
            reason = f"llama.cpp holds {self.type} values under flash attention only"
            raise UsageError(reason, hint="--type f16, or leave out --no-flash-attention")

    @property
    def quantised(self) -> bool:
        """Whether keys and values are codes."""
        return self.type in ("q8_0", "q4_0")

    def rotated(self, head_dim: int) -> tuple[int, int]:
        """Return how many numbers of a key and of a value are mixed before they are rounded."""
        if not self.quantised or head_dim % _TURNED:
            return 0, 0
        return head_dim & -head_dim, _TURNED  # the largest power of two that divides it

    def state(
        self, layers: Sequence[tuple[Tensor, Tensor]], ids: Sequence[int], family: str
    ) -> Iterator[bytes]:
        """Yield the bytes of a state.

        Args:
            layers: keys and values, each (kv_heads, slots, head_dim).
            ids: of the prompt that the state is of, one a slot.
            family: of the model, of `NEIGHBOURS` or `HALVES`.
        """
        slots, (heads, _, head_dim) = len(ids), layers[0][0].shape
        if self.quantised and heads * head_dim % _BLOCK:
            reason = f"{self.type} rounds {_BLOCK} numbers at a time, a slot has {heads * head_dim}"
            raise UsageError(reason, hint="--type f16")
        turned = self.rotated(head_dim)
        yield HEAD.pack(MAGIC, int(self.version), slots) + struct.pack(f"<{slots}i", *ids)
        yield struct.pack("<2I", self.streams, slots)
        for place in range(slots):
            yield struct.pack("<iIi", place, 1, 0)  # its position, of one sequence
        yield struct.pack("<2I", self.transposed, len(layers))
        if self.version >= "4":
            yield struct.pack("<2I", *turned)
        for keys, _ in layers:
            paired = _neighbours(keys) if family in NEIGHBOURS else keys
            yield from self.rows(_mixed(paired, turned[0]))
        for _, values in layers:
            yield from self.rows(_mixed(values, turned[1]), transposed=self.transposed)
        yield bytes(4 * (self.streams - 1))  # the other streams have no cells

    def rows(self, states: Tensor, *, transposed: bool = False) -> Iterator[bytes]:
        """Yield the bytes of a layer's keys or values, (kv_heads, slots, head_dim)."""
        flat = states.transpose(0, 1).flatten(1).float().cpu()
        data, kind = {"f32": Tensor.float, "f16": Tensor.half}.get(self.type), TYPES[self.type]
        codes = data(flat) if data else (_q8_0 if self.type == "q8_0" else _q4_0)(flat)
        if transposed:
            yield struct.pack("<i2I", kind, codes.element_size(), codes.shape[1])
            codes = codes.t()
        else:
            yield struct.pack("<iQ", kind, codes.shape[1] * codes.element_size())
        yield codes.contiguous().numpy().tobytes()


def describe_path(path: Path) -> Path:
    """Return the file beside a state that says how to ask about it, `book.bin.json`."""
    return path.with_name(f"{path.name}.json")


def read_ids(path: Path) -> list[int]:
    """Return the ids of the prompt that a state is of; `UsageError`: the file is no state."""
    with open(path, "rb") as file:
        magic, _, count = HEAD.unpack(file.read(HEAD.size).ljust(HEAD.size, b"\0"))
        data = file.read(4 * count) if magic == MAGIC else b""
    if not data or len(data) != 4 * count:
        raise UsageError(f"`{path}` is no state of llama.cpp", hint="kvtool export --to llamacpp")
    return list(struct.unpack(f"<{count}i", data))


def _neighbours(keys: Tensor) -> Tensor:
    """Put halves into pairs of neighbours: number j beside number j + head_dim / 2."""
    return keys.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def _mixed(states: Tensor, width: int) -> Tensor:
    """Multiply by a Hadamard matrix, which evens out the numbers that share a scale."""
    if not width:
        return states
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    matrix = reduce(torch.kron, [two] * (width.bit_length() - 1)) / width**0.5
    return (states.float().cpu().unflatten(-1, (-1, width)) @ matrix).flatten(-2)


def _q8_0(rows: Tensor) -> Tensor:
    """Round blocks of 32 numbers to 8 bits and a scale: (rows, bytes) uint8."""
    blocks = rows.unflatten(-1, (-1, _BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = (blocks / scale.masked_fill(scale == 0, 1)).round().to(torch.int8)
    return torch.cat([scale.half().view(torch.uint8), codes.view(torch.uint8)], -1).flatten(1)


def _q4_0(rows: Tensor) -> Tensor:
    """Round blocks of 32 numbers to 4 bits and a scale: (rows, bytes) uint8."""
    blocks = rows.unflatten(-1, (-1, _BLOCK))
    scale = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    codes = (blocks / scale.masked_fill(scale == 0, 1) + 8.5).to(torch.uint8).clamp_(max=15)
    low, high = codes.chunk(2, -1)
    return torch.cat([scale.half().view(torch.uint8), low | high << 4], -1).flatten(1)
