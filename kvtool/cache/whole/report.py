"""Report of a cache: what it holds and what its last step read, counted from its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtool.cache.features.calidrop import Calibration
from kvtool.cache.slots.layer import SlotLayer
from kvtool.policies.numbers import KVHeads


@dataclass(frozen=True)
class CacheReport:
    """What a cache holds, counted from its tensors.

    Attributes:
        tokens_seen: tokens of the longest sequence, padding excluded.
        kept_per_layer: filled slots of the fullest KV head of each layer; 0 for layers without
            attention.
        kv_bytes: keys and values in filled slots, as they are stored (codes and scales).
        allocated_bytes: the key and value buffers.
        state_bytes: positions, the policy's numbers and a reader's tables; with CaliDrop, too, what
            is held of each query head and what waits on the device to be set aside.
        full_bytes: keys and values that a full cache in the model's dtype would hold now.
        peak_bytes: most key and value bytes that existed at a time, the running block included,
            which a layer sees beside its kept tokens in the model's dtype.
        host_bytes: evicted keys and values in host memory (CaliDrop).
        traffic_bytes: what the last decoded token has read of all layers, sequences and heads:
            keys, values and what a reader looked at in order to choose. Host memory is not counted.
        traffic_pairs: the same per layer, sequence and KV head, a pair of key and value as the
            unit; the mean over the layers without a sliding window.
        recompute_frequency: of each layer, the share of decoded tokens and query heads that
            attended to those in host memory anew, None before the first; None without CaliDrop.
        evicted: whether any layer stores fewer tokens in any KV head than a full cache would.
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
    evicted: bool = False


_SIZES = (
    "kv_bytes",
    "allocated_bytes",
    "state_bytes",
    "full_bytes",
    "peak_bytes",
    "host_bytes",
    "traffic_bytes",
)


def make_report(
    layers: Sequence[object],
    seen: list[int],
    *,
    peak: int,
    extra: int,
    shards: KVHeads | None,
) -> CacheReport:
    """Count what the layers of a cache hold.

    Args:
        layers: all of the model, those without attention included.
        seen: tokens of each batch entry so far.
        peak: key and value bytes that existed while blocks ran.
        extra: bytes beside the layers.
        shards: under tensor parallelism, add up what each of these processes holds; all of them
            must then ask. Where a family leaves attention whole in each, every copy counts. None:
            count what is here.
    """
    slots = [layer for layer in layers if isinstance(layer, SlotLayer)]
    kept = [_kept(layer) if isinstance(layer, SlotLayer) else 0 for layer in layers]
    kept.append(any(_lacks_tokens(layer, seen) for layer in slots))
    aside = [Calibration.of(each) if isinstance(each, SlotLayer) else None for each in layers]
    sizes = _sizes(slots, seen, peak=peak, extra=extra)
    if shards is not None and shards.processes > 1:
        device = slots[0].slots.device
        sizes = shards.total(torch.tensor(sizes, device=device)).tolist()
        kept = shards.most(torch.tensor(kept, device=device)).tolist()
    *kept, evicted = kept
    frequency = [None if part is None else part.recompute_frequency for part in aside]
    return CacheReport(
        tokens_seen=max(seen),
        kept_per_layer=kept,
        **dict(zip(_SIZES, sizes, strict=True)),
        traffic_pairs=_pairs_read(slots),
        recompute_frequency=frequency if any(aside) else None,
        evicted=bool(evicted),
    )


def _sizes(slots: Sequence[SlotLayer], seen: list[int], *, peak: int, extra: int) -> list[int]:
    """Count the bytes of layers, in the order of `_SIZES`."""
    allocated = sum(store.slots.kv_bytes for layer in slots for store in layer.stores_in_use)
    aside = [part for part in map(Calibration.of, slots) if part is not None]
    return [
        sum(_filled_bytes(layer) for layer in slots),
        allocated,
        sum(_state_bytes(layer) for layer in slots) + extra,
        sum(_full_bytes(layer, seen) for layer in slots),
        max(peak, allocated),
        sum(part.store.host_bytes for part in aside),
        round(sum(bytes_read(layer) for layer in slots)),
    ]


def _pairs_read(slots: Sequence[SlotLayer]) -> float:
    """Average what layers have read of the last decoded token's pairs, windows left out if any."""
    whole = [layer for layer in slots if layer.window is None] or slots
    return sum(layer.pairs_read for layer in whole) / len(whole)


def _kept(layer: SlotLayer) -> int:
    """Filled slots of the fullest KV head."""
    if not layer.is_initialized:
        return 0
    filled = (layer.stored_positions() >= 0).sum(-1)
    return int(filled.max()) if filled.numel() else 0


def _filled_bytes(layer: SlotLayer) -> int:
    """Bytes of the keys and values of filled slots."""
    if not layer.is_initialized:
        return 0
    return int((layer.stored_positions() >= 0).sum()) * layer.slots.token_bytes


def _lacks_tokens(layer: SlotLayer, seen: list[int]) -> bool:
    """Whether fewer slots are filled than nothing evicted would fill."""
    if not layer.is_initialized:
        return False
    filled = int((layer.stored_positions() >= 0).sum())
    return filled < _full_tokens(layer, seen) * layer.slots.kv_heads


def _state_bytes(layer: SlotLayer) -> int:
    """Bytes beside keys and values: positions, the policy's numbers, what features keep."""
    if not layer.is_initialized:
        return 0
    parts = sum(part.nbytes for part in layer.parts.values())
    return parts + sum(store.slots.state_bytes for store in layer.stores)


def bytes_read(layer: SlotLayer) -> float:
    """Bytes of keys, values and tables that the last decoded token has read."""
    if not layer.is_initialized:
        return 0
    slots = layer.slots
    return layer.pairs_read * slots.token_bytes * slots.batch * slots.kv_heads


def _full_bytes(layer: SlotLayer, seen: list[int]) -> int:
    """Bytes that a layer would hold of sequences so long, if nothing were evicted."""
    if not layer.is_initialized:
        return 0
    return _full_tokens(layer, seen) * layer.slots.kv_heads * layer.slots.full_token_bytes


def _full_tokens(layer: SlotLayer, seen: list[int]) -> int:
    """Tokens that a layer would hold of all sequences, if nothing were evicted."""
    return sum(n if layer.window is None else min(n, layer.window - 1) for n in seen)
