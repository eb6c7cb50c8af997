"""Estimate the memory of a full cache from a model's configuration alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from kvtool.documents.profile import MemoryTable
from kvtool.model_shape import layer_shapes, stored_dtype, trained_length
from kvtool.planning.bytes import kv_bytes, tokens_held

BATCHES = (1, 4, 16, 64)
MEMORY = tuple(size * 2**30 for size in (1, 4, 8, 16, 24, 48, 80))
_CONTEXTS = (2**10, 2**12, 2**14, 2**15, 2**16, 2**17)
_UNENDING = 2**40  # tokens or rows that no run reaches


def memory_table(config: Any, dtype: str | None = None) -> MemoryTable:
    """Return the bytes of contexts and batches, and what fits into usual sizes of memory.

    Weights, activations and what a policy keeps beside keys and values are not counted.

    Args:
        config: a transformers configuration.
        dtype: of keys and values; None or `auto`: the checkpoint's own.
    """
    layers = layer_shapes(config, dtype)
    contexts = _contexts(trained_length(config))

    def used(tokens: int) -> int:
        return kv_bytes(layers, tokens_held(layers, tokens))

    return MemoryTable(
        dtype=stored_dtype(config, dtype),
        layer_bytes_per_token=[0 if layer is None else layer.bytes for layer in layers],
        layer_window=[None if layer is None else layer.window for layer in layers],
        contexts=contexts,
        batches=list(BATCHES),
        bytes=[[used(tokens) * rows for rows in BATCHES] for tokens in contexts],
        memory=list(MEMORY),
        largest_context=[
            [_most_that_fits(used, size // rows) for rows in BATCHES] for size in MEMORY
        ],
        largest_batch=[[size // used(tokens) for tokens in contexts] for size in MEMORY],
    )


def _most_that_fits(used: Callable[[int], int], size: int) -> int | None:
    """Return the largest number whose bytes are within `size`, None if every number's are."""
    if used(_UNENDING) <= size:
        return None
    return bisect_right(range(_UNENDING), size, key=used) - 1


def _contexts(trained: int | None) -> list[int]:
    """Return round lengths up to the one that the model was trained for, and that one."""
    if trained is None:
        return list(_CONTEXTS)
    return sorted({length for length in _CONTEXTS if length < trained} | {trained})
