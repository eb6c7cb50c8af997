"""Every result of a run held against the full cache's, sample by sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.documents.results import TaskResult
from kvtool.documents.verdict import Interval, Paired
from kvtool.evaluation.metrics.summary import Part, Summary
from kvtool.evaluation.paired import Estimate, difference, mean_of, ratio
from kvtool.evaluation.run.collect import (
    Measured,
    is_baseline,
    summarise,
    task_result,
    with_deltas,
)


@dataclass(frozen=True)
class _Scored:
    """The records of one variant on one task, what they come to, and the result of it."""

    measured: Measured
    summary: Summary | None
    result: TaskResult


def compared_results(measured: Sequence[Measured]) -> list[TaskResult]:
    """Score the records of all variants and tasks, each held against the full cache's.

    Raises:
        KvtoolError: records that cannot be scored.
    """
    summaries = [summarise(each) for each in measured]
    results = with_deltas(list(map(task_result, measured, summaries)))
    return _with_pairs(list(map(_Scored, measured, summaries, results)))


def _with_pairs(scored: Sequence[_Scored]) -> list[TaskResult]:
    """Return the results in order, each with its difference to the full cache where it has one."""
    full = {each.result.task: each for each in scored if is_baseline(each.result.arm)}
    return [
        each.result.model_copy(update={"paired": _paired(each, full.get(each.result.task))})
        for each in scored
    ]


def _paired(ours: _Scored, full: _Scored | None) -> Paired | None:
    """Return the difference over the samples that both have; None where it means nothing."""
    if full is None or ours is full or ours.summary is None or full.summary is None:
        return None
    if not ours.result.fed_like(full.result):
        return None
    mine, theirs = _parts(ours), _parts(full)
    shared = [name for name in theirs if name in mine]
    if not shared:
        return None
    mine_of, theirs_of = [mine[name] for name in shared], [theirs[name] for name in shared]
    link = full.summary.link
    found, score = difference(mine_of, theirs_of, link), link(mean_of(theirs_of))
    if not (math.isfinite(found.value) and math.isfinite(score)):
        return None
    return Paired(
        n=len(shared),
        full=score,
        difference=found.value,
        low=found.low,
        high=found.high,
        speed=_speed(ours.measured, full.measured),
    )


def _parts(scored: _Scored) -> dict[str, Part]:
    """Return what each sample gives to the headline, by its id; empty where that is no mean."""
    parts = [] if scored.summary is None else scored.summary.parts
    if len(parts) != len(scored.measured.records):
        return {}
    ids = [record["id"] for record in scored.measured.records]
    return dict(zip(ids, parts, strict=True))


def _speed(ours: Measured, full: Measured) -> Interval | None:
    """Divide the decoded tokens per second: all tokens over all seconds of the shared samples."""
    mine, theirs = _decoded(ours), _decoded(full)
    shared = [name for name in theirs if name in mine]
    if not shared:
        return None
    found: Estimate = ratio([mine[name] for name in shared], [theirs[name] for name in shared])
    if found.low is None or found.high is None or not math.isfinite(found.value):
        return None
    return Interval(value=found.value, low=found.low, high=found.high)


def _decoded(measured: Measured) -> dict[str, Part]:
    costs = {record["id"]: record.get("cost", {}) for record in measured.records}
    return {
        name: (float(cost["decoded_tokens"]), float(cost["decode_s"]))
        for name, cost in costs.items()
        if cost.get("decoded_tokens", 0) > 0 and cost.get("decode_s", 0) > 0
    }
