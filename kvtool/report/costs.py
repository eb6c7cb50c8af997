"""Costs of a variant over all its samples, whatever the task."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvtool.documents.results import Cost, ResultsDocument, TaskResult, VariantEntry


@dataclass(frozen=True)
class Spent:
    """Means over the samples of `tasks`.

    Attributes:
        tasks: the tasks that were measured; costs compare only over the same ones.
        held_bytes: buffers of keys and values and the policy's own numbers.
        kv_bytes: keys and values at the end of a sample.
        state_bytes: the policy's own numbers.
        full_bytes: what a full cache would hold.
        prefill_s: seconds for a prompt.
        prefill_rate: prompt tokens per second, all tokens over all seconds; None if not measured.
        decode_rate: generated tokens per second, likewise.
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
    prefill_s: float
    prefill_rate: float | None
    decode_rate: float | None
    kept: tuple[float, ...] = ()
    written: float = 0.0
    evicted: float | None = None
    host_bytes: float = 0.0

    @property
    def kv_share(self) -> float:
        """Keys and values as a share of the full cache."""
        return self.kv_bytes / self.full_bytes if self.full_bytes else math.nan

    def times_smaller(self, full: Spent | None) -> float | None:
        """Return the full cache's held bytes over these, if measured on the same tasks."""
        if full is None or set(full.tasks) != set(self.tasks) or not self.held_bytes:
            return None
        return full.held_bytes / self.held_bytes

    @property
    def state_share(self) -> float:
        """The policy's own numbers as a share of the full cache."""
        return self.state_bytes / self.full_bytes if self.full_bytes else math.nan

    @property
    def host_share(self) -> float:
        """Evicted tokens in host memory as a share of the full cache."""
        return self.host_bytes / self.full_bytes if self.full_bytes else math.nan


def spent_on(results: list[TaskResult]) -> Spent | None:
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

    return Spent(
        tasks=tuple(task for task, _, _ in costs),
        held_bytes=mean(lambda cost: cost.held_bytes),
        kv_bytes=mean(lambda cost: cost.kv_bytes),
        state_bytes=mean(lambda cost: cost.state_bytes),
        full_bytes=mean(lambda cost: cost.full_bytes),
        prefill_s=mean(lambda cost: cost.prefill_s),
        prefill_rate=rate("prefill_s", "prefill_tokens_per_s"),
        decode_rate=rate("decode_s", "decode_tokens_per_s"),
        kept=_kept([(n, cost.kept_per_layer) for _, n, cost in costs]),
        written=mean(lambda cost: cost.new_tokens),
        evicted=None
        if any(cost.evicted_share is None for *_, cost in costs)
        else mean(lambda cost: cost.evicted_share or 0.0),
        host_bytes=mean(lambda cost: cost.host_bytes or 0.0),
    )


UNTESTED = "°"
"""The mark of a score that is no test of compression."""

LEAST_EVICTED = 0.2
"""The share of samples that must lose a token for a score to be a test of compression."""


def is_tested(result: TaskResult, variant: VariantEntry) -> bool:
    """Return whether enough samples lost tokens for the score to say something of the policy.

    A policy without a budget, a reader and a codec are tested in another way: all of them do.
    """
    share = None if result.cost is None else result.cost.evicted_share
    evicts = variant.budget is not None and not variant.reads and variant.codec is None
    return share is None or not evicts or share >= LEAST_EVICTED


def _kept(layers: list[tuple[int, list[float]]]) -> tuple[float, ...]:
    """Return the mean of each layer, tasks weighted by their samples."""
    if len({len(kept) for _, kept in layers}) > 1:
        return ()
    samples = sum(n for n, _ in layers)
    weighted = [[n * tokens for tokens in kept] for n, kept in layers]
    return tuple(sum(column) / samples for column in zip(*weighted, strict=True))


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
