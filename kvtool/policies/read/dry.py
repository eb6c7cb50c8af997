"""Count what a reader's tables take and what its step reads.

Readers that can count do; others run on tensors without content.
"""

from __future__ import annotations

from kvtool.lazy_torch import Tensor, torch
from kvtool.policies.parts import HeadSizes, Read
from kvtool.policies.read.paged import Paged
from kvtool.policies.read.rows import RowsRead
from kvtool.policies.read.view import ReadView, Stored

_DTYPES = {2: "bfloat16", 4: "float32"}


def table_bytes(reader: Read, layer: HeadSizes, tokens: int) -> int:
    """Return the bytes of the tables of one sequence.

    Args:
        reader: with all its sizes.
        tokens: how many there are to choose from, or can be.
    """
    if isinstance(reader, Paged):
        return reader.counted_table(layer, tokens)
    return run_tables(reader, layer, tokens)


def run_tables(reader: Read, layer: HeadSizes, tokens: int) -> int:
    """Return the same, found by making the tables without content."""
    return sum(table.numel() * table.element_size() for table in _tables(reader, layer, tokens))


def step_bytes(reader: Read, layer: HeadSizes, tokens: int) -> int:
    """Return what a step reads of one row: keys, values and what was looked at to choose.

    Args:
        reader: with all its sizes.
        tokens: how many there are to choose from.
    """
    counted = reader.counted_step(layer, tokens) if isinstance(reader, RowsRead) else None
    return run_step(reader, layer, tokens) if counted is None else counted


def run_step(reader: Read, layer: HeadSizes, tokens: int) -> int:
    """Return the same, found by running the reader without content."""
    tables = reader.start(_stored(layer, tokens))
    view = ReadView(
        query=_empty(layer, layer.heads // layer.kv_heads, layer.key_dim),
        keys=_empty(layer, tokens, layer.key_dim),
        tables=tables,
        tokens=tokens,
        scale=1.0,
    )
    choice = reader.choose(view)
    pair = layer.key_dim + layer.value_dim
    pairs = tokens * layer.kv_heads if choice.slots is None else choice.slots.numel()
    return (choice.estimate * layer.kv_heads + pairs * pair) * layer.itemsize


def _tables(reader: Read, layer: HeadSizes, tokens: int) -> list[Tensor]:
    return list(reader.start(_stored(layer, tokens)).values())


def _stored(layer: HeadSizes, tokens: int) -> Stored:
    basis = torch.empty(layer.kv_heads, layer.key_dim, layer.key_dim, device="meta")
    keys = _empty(layer, tokens, layer.key_dim)
    return Stored(keys, _empty(layer, tokens, layer.value_dim), tokens, basis)


def _empty(layer: HeadSizes, tokens: int, dim: int) -> Tensor:
    """Make a (1, kv_heads, tokens, dim) tensor of no content."""
    shape = (1, layer.kv_heads, tokens, dim)
    return torch.empty(shape, dtype=getattr(torch, _DTYPES[layer.itemsize]), device="meta")
