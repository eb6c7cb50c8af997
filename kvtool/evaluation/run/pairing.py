"""Every result of a run with the scores of its samples, held against the full cache's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kvtool.documents.results import TaskResult
from kvtool.documents.verdict import Interval, Paired, SampleScores
from kvtool.evaluation.differences import between, shared
from kvtool.evaluation.metrics.summary import LINKS, Part, Summary
from kvtool.evaluation.paired import Estimate, mean_of, ratio
from kvtool.evaluation.run.collect import (
    Measured,
    is_baseline,
    summarise,
    task_result,
    with_deltas,
)


def compared_results(measured: Sequence[Measured]) -> list[TaskResult]:
    """Score the records of all variants and tasks, each held against the full cache's.

    Raises:
        KvtoolError: records that cannot be scored.
    """
    summaries = [summarise(each) for each in measured]
    results = with_deltas(list(map(task_result, measured, summaries)))
    names = sample_names(measured)
    scored = [
        result.model_copy(update={"scores": _scores(each, summary, names[each.task.name])})
        for each, summary, result in zip(measured, summaries, results, strict=True)
    ]
    full = {
        each.task.name: (each, result)
        for each, result in zip(measured, scored, strict=True)
        if is_baseline(result.arm)
    }
    return [
        result.model_copy(update={"paired": _paired(each, result, full.get(each.task.name))})
        for each, result in zip(measured, scored, strict=True)
    ]


def sample_names(measured: Sequence[Measured]) -> dict[str, list[str]]:
    """Return the names of the samples of each task that any variant has a result of."""
    names: dict[str, dict[str, None]] = {}
    for each in measured:
        of_task = names.setdefault(each.task.name, {})
        of_task |= dict.fromkeys(record["id"] for record in each.records)
    return {task: list(found) for task, found in names.items()}


def _scores(
    measured: Measured, summary: Summary | None, names: Sequence[str]
) -> SampleScores | None:
    """Return what each sample gives to the headline; None where that is no mean."""
    if summary is None or len(summary.parts) != len(measured.records):
        return None
    if not all(math.isfinite(value) for part in summary.parts for value in part):
        return None
    ids = [record["id"] for record in measured.records]
    parts: Mapping[str, Part] = dict(zip(ids, summary.parts, strict=True))
    sums, weights = (
        [parts[name][i] if name in parts else None for name in names] for i in range(2)
    )
    plain = all(weight in (1.0, None) for weight in weights)
    return SampleScores(sums=sums, weights=None if plain else weights, link=summary.link)


def _paired(
    measured: Measured, result: TaskResult, full: tuple[Measured, TaskResult] | None
) -> Paired | None:
    """Return the difference over the samples that both have; None where it means nothing."""
    if full is None or full[1] is result:
        return None
    found, theirs = between(result, full[1]), full[1].scores
    if found is None or result.scores is None or theirs is None:
        return None
    score = LINKS[theirs.link](mean_of([part for _, part in shared(result.scores, theirs)]))
    if not math.isfinite(score):
        return None
    return Paired(
        n=found.n,
        full=score,
        difference=found.difference,
        low=found.low,
        high=found.high,
        speed=_speed(measured, full[0]),
    )


def _speed(ours: Measured, full: Measured) -> Interval | None:
    """Divide the decoded tokens per second: all tokens over all seconds of the shared samples."""
    mine, theirs = _decoded(ours), _decoded(full)
    names = [name for name in theirs if name in mine]
    if not names:
        return None
    found: Estimate = ratio([mine[name] for name in names], [theirs[name] for name in names])
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
