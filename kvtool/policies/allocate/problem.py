"""The problem of an allocator: a total to split, and the facts that it is shown.

Only layers whose budget is free are here: not those with a sliding window or without attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.lazy_torch import Tensor
from kvtool.maths.allocation import Allocation, allocate

UNLIMITED = 2**30  # tokens of a head that keeps everything, whatever comes


@dataclass(frozen=True)
class LossCurves:
    """What is lost of an answer where one layer alone is cut to each of a few budgets, in nats.

    Or where one KV head of a layer is cut; then the heads take the place of layers.

    Attributes:
        budgets: tokens per layer and KV head, ascending.
        by_sample: samples x layers x budgets, 0 or more.
    """

    budgets: Sequence[int]
    by_sample: Sequence[Sequence[Sequence[float]]]

    def mean(self, layer: int) -> list[float]:
        """Return the mean loss of a layer over the samples, for each budget."""
        rows = [sample[layer] for sample in self.by_sample]
        return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]


NOT_MEASURED = LossCurves((), ())


@dataclass(frozen=True)
class AllocationProblem:
    """A total to split over layers, for a prompt of a known length.

    Attributes:
        total: tokens of all layers together, per KV head.
        min_budgets: least of each layer.
        max_budgets: most of each layer: the tokens of the prompt.
        window: newest tokens that every layer keeps, where the policy has such a window.
        variance: F of each layer (see `kvtool.policies.allocate.d2o`), nothing if not measured.
        largest: the largest F that each layer could have had, n - 1 over a prompt of n tokens.
        curves: loss of the answer against budget, empty if not measured.
        head_curves: the same for each KV head of each layer, empty if not measured.
        shares: share of the prompt for each layer, from published curves; nothing without them.
    """

    total: int
    min_budgets: Sequence[int]
    max_budgets: Sequence[int]
    window: int | None = None
    variance: Sequence[float] = ()
    largest: Sequence[float] = ()
    curves: LossCurves = NOT_MEASURED
    head_curves: Sequence[LossCurves] = ()
    shares: Sequence[float] = ()

    @property
    def layers(self) -> int:
        """Count the layers that divide the total."""
        return len(self.min_budgets)

    def by_weight(self, log_weights: Sequence[float]) -> Allocation:
        """Split in proportion to weights, given as logarithms."""
        return allocate(log_weights, self.total, self.min_budgets, self.max_budgets)


@dataclass(frozen=True)
class Heads:
    """A layer's budget to split over its KV heads, when the layer is cut.

    Attributes:
        budget: mean tokens per head, one number or (batch, 1, 1).
        importance: (batch, kv_heads, slots) float32, higher = keep.
        positions: (batch, kv_heads, slots), -1 = empty.
        protected: bool (batch, kv_heads, slots), slots that stay in any case; None: none.
        min_free: tokens that every head must have beside the protected ones.
        tokens_seen: tokens of the text so far, one number or (batch, 1, 1).
        rank: (kv_heads,) int64, place of each head among all heads of the model, 0 for the one that
            most needs the whole text; None where heads are not ranked.
        of: how many heads were ranked.
    """

    budget: int | Tensor
    importance: Tensor
    positions: Tensor
    protected: Tensor | None
    min_free: int
    tokens_seen: int | Tensor
    rank: Tensor | None = None
    of: int = 0
