"""How much memory a full cache takes, from a model's configuration alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from kvtool.documents.profile import MemoryTable
from kvtool.profiling.shape import layer_bytes, layer_kinds, stored_dtype

BATCHES = (1, 4, 16, 64)
MEMORY = tuple(size * 2**30 for size in (1, 4, 8, 16, 24, 48, 80))
_CONTEXTS = (2**10, 2**12, 2**14, 2**15, 2**16, 2**17)
_UNENDING = 2**40  # tokens or rows that nobody will reach


def memory_table(config: Any, dtype: str | None = None) -> MemoryTable:
    """Return the bytes of contexts and batches, and what fits into usual sizes of memory.

    Weights, activations and what a policy keeps beside keys and values are not counted.

    Args:
        config: a transformers configuration.
        dtype: as for `model_shape`.
    """
    text = config.get_text_config(decoder=True)
    dtype = stored_dtype(text, dtype)
    _, windows = layer_kinds(text)
    layers = layer_bytes(text, dtype)
    most = [None if window is None else max(1, window - 1) for window in windows]
    contexts = _contexts(getattr(text, "max_position_embeddings", None))

    def used(tokens: int) -> int:
        return cache_bytes(layers, most, tokens)

    return MemoryTable(
        dtype=dtype,
        layer_bytes_per_token=layers,
        layer_window=most,
        contexts=contexts,
        batches=list(BATCHES),
        bytes=[[used(tokens) * rows for rows in BATCHES] for tokens in contexts],
        memory=list(MEMORY),
        largest_context=[
            [_most_that_fits(lambda n, rows=rows: used(n) * rows, size) for rows in BATCHES]
            for size in MEMORY
        ],
        largest_batch=[[size // used(tokens) for tokens in contexts] for size in MEMORY],
    )


def cache_bytes(layers: Sequence[int], most: Sequence[int | None], tokens: int) -> int:
    """Return the bytes of one row of a full cache.

    Args:
        layers: bytes per token of each layer.
        most: tokens that a layer stores at most, None where that is all of them.
    """
    return sum(
        size * (tokens if limit is None else min(tokens, limit))
        for size, limit in zip(layers, most, strict=True)
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
