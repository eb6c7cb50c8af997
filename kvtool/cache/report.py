"""What a cache holds and what its last step read, counted from its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvtool.cache.slots import SlotLayer

if TYPE_CHECKING:
    from kvtool.cache.cache import KVCache


@dataclass(frozen=True)
class CacheReport:
    """What a cache holds, counted from its tensors.

    Attributes:
        tokens_seen: tokens of the longest row, padding excluded.
        kept_per_layer: filled slots of the fullest KV head of each layer; 0 for layers without
            attention.
        kv_bytes: keys and values in filled slots.
        allocated_bytes: the key and value buffers.
        state_bytes: positions, the policy's numbers and a reader's tables; with CaliDrop, too, what
            is held of each query head and what waits on the device to be set aside.
        full_bytes: keys and values that a full cache would hold now.
        peak_bytes: most key and value bytes that existed at a time, running blocks included.
        host_bytes: evicted keys and values in host memory (CaliDrop).
        traffic_bytes: what the last decoded token has read of all layers, rows and heads: keys,
            values and what a reader looked at in order to choose; host memory is not counted.
        traffic_pairs: the same per layer, row and KV head, a pair of key and value as the unit; the
            mean over the layers without a sliding window.
        recompute_frequency: of each layer, the share of decoded tokens and query heads that
            attended to those in host memory anew, None before the first; None without CaliDrop.
    """

    tokens_seen: int
    kept_per_layer: list[int]
    kv_bytes: int
    allocated_bytes: int
    state_bytes: int
    full_bytes: int
    peak_bytes: int
    host_bytes: int = 0
    traffic_bytes: int = 0
    traffic_pairs: float = 0
    recompute_frequency: list[float | None] | None = None


def make_report(cache: KVCache, *, of_all_processes: bool = False) -> CacheReport:
    """Count what a cache holds.

    Args:
        of_all_processes: under tensor parallelism, add up what each process holds; all of them must
            then ask. Where a family leaves attention whole in each process, every copy counts.
    """
    seen = cache.tokens_seen()
    slots = cache.slot_layers
    kept = [
        cache.kept_positions(i).shape[-1]
        if isinstance(layer, SlotLayer) and layer.is_initialized
        else 0
        for i, layer in enumerate(cache.layers)
    ]
    allocated = cache.allocated_bytes()
    aside = [getattr(layer, "calibration", None) for layer in cache.layers]
    sizes = [
        sum(layer.filled_bytes() for layer in slots),
        allocated,
        sum(layer.state_bytes() for layer in slots)
        + (0 if cache.surprisals is None else cache.surprisals.bytes),
        sum(_full_bytes(layer, seen) for layer in slots),
        max(cache.peak_bytes, allocated),
        sum(part.store.host_bytes for part in aside if part is not None),
        round(sum(layer.bytes_read() for layer in slots)),
    ]
    if of_all_processes and cache.shards.processes > 1:
        device = cache.first_layer.device
        sizes = cache.shards.total(torch.tensor(sizes, device=device)).tolist()
        kept = cache.shards.most(torch.tensor(kept, device=device)).tolist()
    read = [layer.pairs_read for layer in slots if layer.window is None]
    read = read or [layer.pairs_read for layer in slots]
    frequency = [None if part is None else part.recompute_frequency for part in aside]
    return CacheReport(
        max(seen), kept, *sizes, sum(read) / len(read), frequency if any(aside) else None
    )


def _full_bytes(layer: SlotLayer, seen: list[int]) -> int:
    """Bytes that a layer would hold of rows so long, if nothing were evicted."""
    if not layer.is_initialized:
        return 0
    tokens = sum(n if layer.window is None else min(n, layer.window - 1) for n in seen)
    return tokens * layer.positions.shape[1] * layer.token_bytes()
