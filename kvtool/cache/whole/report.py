"""What a cache holds, counted from its tensors, and which tokens of a text that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.cache.features.calidrop import Calibration
from kvtool.cache.features.sparse_index import SparseIndex
from kvtool.cache.features.trace import TOP, Trace
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


Mark = Literal["merged", "offloaded", "read"]
"""What is shown of tokens beside whether they are held: evicted ones that were merged into others
or moved to host memory, and held ones that the last decoded tokens have read."""


@dataclass(frozen=True)
class KeptLayer:
    """What one layer holds of a text.

    Attributes:
        index: of the layer in the model.
        kept: bool (kv_heads, tokens), by position.
        marked: of the same shape; None where the policy has nothing of the kind.
    """

    index: int
    kept: Tensor
    marked: Tensor | None = None


@dataclass(frozen=True)
class KeptTokens:
    """What the layers of a cache hold of one text.

    Layers with a sliding window hold that and nothing else, so they are left out where others are
    there.

    Attributes:
        tokens: of the text, as far as it has been read.
        mark: what the marks mean; None: there are none.
        reads: decoded tokens that `read` marks cover.
        score: (tokens,) uint8, the rank of each token's importance when it was last judged, among
            all tokens of the text. Importance is the mean over layers and heads. 0 where no cut has
            judged a token. None where nothing was recorded or cut.
    """

    tokens: int
    layers: tuple[KeptLayer, ...]
    mark: Mark | None = None
    reads: int = 0
    score: Tensor | None = None

    @property
    def share(self) -> Tensor:
        """Share of layers and heads that hold each token, (tokens,) float32."""
        return _share([layer.kept for layer in self.layers])

    @property
    def shade(self) -> Tensor:
        """The share that a token is shaded by: of a reader, those that have read it lately."""
        return self.marked_share if self.mark == "read" else self.share

    @property
    def marked_share(self) -> Tensor:
        """Share of layers and heads that have marked each token, (tokens,) float32."""
        return _share(
            [torch.zeros_like(e.kept) if e.marked is None else e.marked for e in self.layers]
        )


class HasLayers(Protocol):
    """A cache, as far as its tokens can be found."""

    slot_layers: list[SlotLayer]

    def tokens_seen(self) -> list[int]: ...


def kept_tokens(cache: HasLayers, row: int = 0) -> KeptTokens:
    """Find out which tokens of a batch entry a cache holds.

    Args:
        row: the batch entry.
    """
    tokens = cache.tokens_seen()[row]
    free = [layer for layer in cache.slot_layers if layer.window is None]
    layers = free or cache.slot_layers
    mark = _mark(layers)
    return KeptTokens(
        tokens=tokens,
        layers=tuple(_layer(each, row, tokens, mark) for each in layers),
        mark=mark,
        reads=min(8, max(_steps(each) for each in layers)),
        score=_score(layers, row, tokens),
    )


def _mark(layers: list[SlotLayer]) -> Mark | None:
    """Return what there is to show beside what is held."""
    traces = [trace for trace in map(Trace.of, layers) if trace is not None]
    if any(map(_is_active, map(Calibration.of, layers))):
        return "offloaded"
    if any(trace.steps for trace in traces):
        return "read"
    return "merged" if any(bool(trace.merged.any()) for trace in traces) else None


def _is_active(calibration: Calibration | None) -> bool:
    return calibration is not None and calibration.active


def _steps(layer: SlotLayer) -> int:
    trace = Trace.of(layer)
    return 0 if trace is None else trace.steps


def _layer(layer: SlotLayer, row: int, tokens: int, mark: Mark | None) -> KeptLayer:
    kept = _by_position(layer.stored_positions()[row], tokens)
    return KeptLayer(layer.index, kept, None if mark is None else _marks(layer, row, kept, mark))


def _marks(layer: SlotLayer, row: int, kept: Tensor, mark: Mark) -> Tensor:
    """Return which tokens have the mark in a layer, (kv_heads, tokens) bool."""
    tokens, nothing = kept.shape[1], torch.zeros_like(kept)
    if mark == "offloaded":
        calibration = Calibration.of(layer)
        if calibration is None or not calibration.active:
            return nothing
        return _by_position(calibration.store.positions(row), tokens) & ~kept
    trace = Trace.of(layer)
    if mark == "read":
        if SparseIndex.of(layer) is None:
            return kept  # such a layer reads all that it holds
        return nothing if trace is None else _fitted(trace.reads[row], tokens) > 0
    return nothing if trace is None else _fitted(trace.merged[row], tokens) & ~kept


def _score(layers: list[SlotLayer], row: int, tokens: int) -> Tensor | None:
    """Rank all tokens by the mean of their ranks in layers and heads: see `KeptTokens.score`."""
    total = torch.zeros(tokens, dtype=torch.int64)
    for trace in map(Trace.of, layers):
        if trace is not None and trace.ranks.numel():
            total += _fitted(trace.ranks[row], tokens).sum(0)
    judged = total > 0
    count = int(judged.sum())
    if not count:
        return None
    place = torch.searchsorted(total[judged].sort().values, total[judged])
    ranks = torch.zeros(tokens, dtype=torch.uint8)
    ranks[judged] = (1 + place * (TOP - 1) // max(count - 1, 1)).to(torch.uint8)
    return ranks


def _by_position(positions: Tensor, tokens: int) -> Tensor:
    """Return which tokens are among some positions, (kv_heads, tokens) bool; -1 is none."""
    positions = positions.long().cpu()
    there = torch.zeros(len(positions), tokens + 1, dtype=torch.bool)
    return there.scatter_(1, positions.remainder(tokens + 1), True)[:, :tokens]


def _fitted(table: Tensor, tokens: int) -> Tensor:
    return functional.pad(table, (0, tokens - table.shape[-1]))


def _share(heads: list[Tensor]) -> Tensor:
    return torch.cat(heads).float().mean(0)
