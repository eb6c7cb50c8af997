"""Costs of a variant over all its samples, whatever the task."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from kvtool.documents.results import Cost, ResultsDocument, TaskResult, VariantEntry

UNTESTED = "°"
"""The mark of a score that is no test of compression."""

LEAST_EVICTED = 0.2
"""The share of samples that must lose a token for a score to be a test of compression."""


_MEANS = ("held_bytes", "kv_bytes", "state_bytes", "full_bytes", "prefill_s")


@dataclass(frozen=True)
class Spent:
    """Means over the samples of `tasks`; costs compare only over the same ones.

    Bytes are those of a `Cost`.

    Attributes:
        traffic_bytes: that a decoded token reads; None if nothing was decoded on a task.
        prefill_s: seconds for a prompt.
        prefill_rate: prompt tokens per second, all tokens over all seconds; None if not measured.
        decode_rate: generated tokens per second, likewise; None if any were decoded in a batch.
        kept: tokens of each layer's fullest KV head; empty if a run did not record them.
        written: tokens that the model wrote.
        evicted: share of samples in which anything was evicted; None if a run did not record it.
        host_bytes: of evicted tokens in host memory; 0 if a run did not record them.
    """

    tasks: tuple[str, ...]
    held_bytes: float
    kv_bytes: float
    state_bytes: float
    full_bytes: float
    traffic_bytes: float | None
    prefill_s: float
    prefill_rate: float | None
    decode_rate: float | None
    kept: tuple[float, ...]
    written: float
    evicted: float | None
    host_bytes: float

    def share(self, size: float) -> float:
        """Return bytes as a share of the full cache."""
        return size / self.full_bytes if self.full_bytes else math.nan

    def times_smaller(self, full: Spent | None) -> float | None:
        """Return the full cache's held bytes over these, if measured on the same tasks."""
        if full is None or set(full.tasks) != set(self.tasks) or not self.held_bytes:
            return None
        return full.held_bytes / self.held_bytes


def spent_on(results: Sequence[TaskResult]) -> Spent | None:
    """Put the costs of one variant's tasks together, each weighted by its samples; None if none."""
    costs = [(result.task, max(result.n, 1), result.cost) for result in results if result.cost]
    if not costs:
        return None

    def mean(of: Callable[[Cost], float]) -> float:
        return sum(n * of(cost) for _, n, cost in costs) / sum(n for _, n, _ in costs)

    def rate(seconds: str, per_second: str) -> float | None:
        timed = [
            (n * getattr(cost, seconds), getattr(cost, per_second))
            for _, n, cost in costs
            if getattr(cost, per_second) is not None and getattr(cost, seconds) > 0
        ]
        total = sum(time for time, _ in timed)
        return sum(time * speed for time, speed in timed) / total if total else None

    def kept_by(layer: int) -> float:
        return mean(lambda cost: cost.kept_per_layer[layer])

    batched = any(cost.batch for *_, cost in costs)
    recorded = all(cost.evicted_share is not None for *_, cost in costs)
    decoded = all(cost.traffic_bytes for *_, cost in costs)
    alike = len({len(cost.kept_per_layer) for *_, cost in costs}) == 1
    layers = range(len(costs[0][2].kept_per_layer) if alike else 0)
    return Spent(
        tasks=tuple(task for task, _, _ in costs),
        **{name: mean(attrgetter(name)) for name in _MEANS},
        traffic_bytes=mean(lambda cost: cost.traffic_bytes) if decoded else None,
        prefill_rate=rate("prefill_s", "prefill_tokens_per_s"),
        decode_rate=None if batched else rate("decode_s", "decode_tokens_per_s"),
        kept=tuple(map(kept_by, layers)),
        written=mean(lambda cost: cost.new_tokens),
        evicted=mean(lambda cost: cost.evicted_share or 0.0) if recorded else None,
        host_bytes=mean(lambda cost: cost.host_bytes or 0.0),
    )


def spent_by_variant(document: ResultsDocument) -> dict[str, Spent]:
    """Return the cost of every variant that was measured."""
    by_variant: dict[str, list[TaskResult]] = {}
    for result in document.results:
        by_variant.setdefault(result.variant, []).append(result)
    found = {variant: spent_on(results) for variant, results in by_variant.items()}
    return {variant: spent for variant, spent in found.items() if spent is not None}


def relative(rate: str, variant: Spent, full: Spent | None) -> float | None:
    """Return a rate as a multiple of the full cache's, if measured on the same tasks."""
    if full is None or set(full.tasks) != set(variant.tasks):
        return None
    mine, theirs = getattr(variant, rate), getattr(full, rate)
    return mine / theirs if mine is not None and theirs else None


def is_tested(result: TaskResult, variant: VariantEntry) -> bool:
    """Return whether enough samples lost tokens for the score to say something of the policy.

    A policy without a budget, a reader and a codec are tested in another way: all of them do.
    """
    share = None if result.cost is None else result.cost.evicted_share
    evicts = variant.budget is not None and not variant.reads and variant.codec is None
    return share is None or not evicts or share >= LEAST_EVICTED
