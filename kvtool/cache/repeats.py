"""A cache whose prompt is repeated: forwards that are not stored, and the cut that follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import Tensor

from kvtool.cache.state import CacheState
from kvtool.cache.steps.repeat import cut_repeated
from kvtool.cache.storage.layer import SlotLayer
from kvtool.cache.storage.repetition import RepeatedWeights


@contextmanager
def repeating(cache: CacheState, weights: RepeatedWeights) -> Iterator[None]:
    """Take the forwards inside as repetitions: their weights are noted, and nothing is stored."""
    with cache.rollback() if cache.recurrent else nullcontext():
        if cache.repetition is None:
            raise RuntimeError(f"policy `{cache.policy}` has nothing repeated")
        cache.repetition.repeat(weights)
        try:
            yield
        finally:
            cache.repetition.repeat(None)


def beside_slots(layer: SlotLayer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values to attend to, of the slots and of tokens that are not stored."""
    layer.compact()
    joined = layer.slots.joined(keys, values)
    layer.sizing.meter.run(sum(each.nbytes for each in joined))
    return joined


def entry_budgets(cache: CacheState) -> list[int]:
    """Return the least that a layer may keep of each batch entry; without budgets, all of it."""
    entries: list[list[int]] = []
    for layer in _free(cache):
        tokens = layer.budget.tokens
        if isinstance(tokens, Tensor):
            entries.append(tokens.flatten().tolist())
        else:
            entries.append([tokens] * layer.batch_size)
    if not entries:
        return cache.tokens_seen()
    return [min(entry) for entry in zip(*entries, strict=True)]


def end_repetition(
    cache: CacheState, weights: RepeatedWeights | None, spans: Sequence[tuple[int, int]]
) -> None:
    """Cut a prompt by the weights of its repetition; what comes from here on is appended.

    Args:
        weights: None where all of it fits.
        spans: first and last position, excluded, of what was repeated of each batch entry.
    """
    layers = _free(cache)
    if weights is not None:
        cut_repeated(layers, weights, spans)
    for layer in layers:
        layer.grow_exactly(False)
    if cache.repetition is not None:
        cache.repetition.end()


def _free(cache: CacheState) -> list[SlotLayer]:
    return [layer for layer in cache.slot_layers if layer.window is None]
