"""Report of a cache, counted from its tensors, and the tokens of a text that it holds."""

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
    """What a cache holds.

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
        shards: add up what each of these processes holds, copies included; all of them must then
            ask. None: count what is here.
    """
    slots = [layer for layer in layers if isinstance(layer, SlotLayer)]
    used = [layer for layer in slots if layer.is_initialized]
    filled = {each.index: (each.stored_positions() >= 0).sum(-1) for each in used}
    full = {each.index: _full_tokens(each, seen) * each.slots.kv_heads for each in used}
    kept = [
        int(filled[i].max()) if i in filled and len(filled[i]) else 0 for i in range(len(layers))
    ]
    kept.append(any(int(filled[i].sum()) < tokens for i, tokens in full.items()))
    stores = [store.slots for layer in used for store in layer.stores]
    allocated = sum(store.kv_bytes for store in stores)
    beside = sum(part.nbytes for layer in used for part in layer.parts.values())
    aside = [Calibration.of(each) if isinstance(each, SlotLayer) else None for each in layers]
    sizes = [
        sum(int(filled[each.index].sum()) * each.slots.token_bytes for each in used),
        allocated,
        sum(store.state_bytes for store in stores) + beside + extra,
        sum(full[each.index] * each.slots.form.full_token_bytes for each in used),
        max(peak, allocated),
        sum(part.store.host_bytes for part in aside if part is not None),
        round(sum(bytes_read(each) for each in used)),
    ]
    if shards is not None and shards.processes > 1:
        device = slots[0].slots.device
        sizes = shards.total(torch.tensor(sizes, device=device)).tolist()
        kept = shards.most(torch.tensor(kept, device=device)).tolist()
    *kept, evicted = kept
    frequency = [None if part is None else part.recompute_frequency for part in aside]
    whole = [layer for layer in slots if layer.window is None] or slots
    return CacheReport(
        tokens_seen=max(seen),
        kept_per_layer=kept,
        **dict(zip(_SIZES, sizes, strict=True)),
        traffic_pairs=sum(layer.pairs_read for layer in whole) / len(whole),
        recompute_frequency=frequency if any(aside) else None,
        evicted=bool(evicted),
    )


def bytes_read(layer: SlotLayer) -> float:
    """Bytes of keys, values and tables that the last decoded token has read."""
    slots = layer.slots
    return layer.pairs_read * slots.token_bytes * slots.batch * slots.kv_heads


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
    """What the layers of a cache hold of one text; those with a window only if there are no others.

    Attributes:
        tokens: of the text, as far as it has been read.
        mark: what the marks mean; None: there are none.
        reads: decoded tokens that `read` marks cover.
        score: (tokens,) uint8, the rank of each token's importance, the mean over layers and heads,
            when it was last judged; 0: never. None where nothing was recorded or cut.
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
    """Find out which tokens of a batch entry a cache holds."""
    tokens = cache.tokens_seen()[row]
    free = [layer for layer in cache.slot_layers if layer.window is None]
    layers = free or cache.slot_layers
    calibrated = [part for part in map(Calibration.of, layers) if part is not None]
    traces = [trace for trace in map(Trace.of, layers) if trace is not None]
    mark: Mark | None = None
    if any(part.active for part in calibrated):
        mark = "offloaded"
    elif any(trace.steps for trace in traces):
        mark = "read"
    elif any(bool(trace.merged.any()) for trace in traces):
        mark = "merged"
    return KeptTokens(
        tokens=tokens,
        layers=tuple(_layer(each, row, tokens, mark) for each in layers),
        mark=mark,
        reads=min(8, max((trace.steps for trace in traces), default=0)),
        score=_score(traces, row, tokens),
    )


def _layer(layer: SlotLayer, row: int, tokens: int, mark: Mark | None) -> KeptLayer:
    kept = _by_position(layer.stored_positions()[row], tokens)
    return KeptLayer(layer.index, kept, None if mark is None else _marks(layer, row, kept, mark))


def _marks(layer: SlotLayer, row: int, kept: Tensor, mark: Mark) -> Tensor:
    """Return which tokens have the mark in a layer, (kv_heads, tokens) bool."""
    tokens, calibration, trace = kept.shape[1], Calibration.of(layer), Trace.of(layer)
    if mark == "offloaded" and calibration is not None and calibration.active:
        return _by_position(calibration.store.positions(row), tokens) & ~kept
    if mark == "read" and SparseIndex.of(layer) is None:
        return kept  # such a layer reads all that it holds
    if trace is None or mark == "offloaded":
        return torch.zeros_like(kept)
    if mark == "read":
        return _fitted(trace.reads[row], tokens) > 0
    return _fitted(trace.merged[row], tokens) & ~kept


def _score(traces: Sequence[Trace], row: int, tokens: int) -> Tensor | None:
    """Rank all tokens by the mean of their ranks in layers and heads: see `KeptTokens.score`."""
    total = torch.zeros(tokens, dtype=torch.int64)
    for trace in traces:
        if trace.ranks.numel():
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
