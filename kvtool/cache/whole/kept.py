"""Find the tokens of a text that each layer and KV head holds, and what became of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional

from kvtool.cache.features.calidrop import Calibration
from kvtool.cache.features.sparse_index import SparseIndex
from kvtool.cache.features.trace import TOP, Trace
from kvtool.cache.slots.layer import SlotLayer

if TYPE_CHECKING:
    from kvtool.cache.whole.state import CacheState

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


def kept_tokens(cache: CacheState, row: int = 0) -> KeptTokens:
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
