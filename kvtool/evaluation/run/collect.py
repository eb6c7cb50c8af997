"""Collect the records of a run into results: means, standard errors, costs, differences to full."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvtool.documents.results import Average, CellEntry, Cost, CurveEntry, MetricEntry, TaskResult
from kvtool.errors import KvtoolError
from kvtool.evaluation.metrics.summary import Statistic, Summary
from kvtool.evaluation.samples.sample import Json
from kvtool.evaluation.tasks.task import Task
from kvtool.planning.variants import BASELINE


@dataclass(frozen=True)
class Measured:
    """The records of one variant on one task, in the order of the samples; failed ones apart.

    Attributes:
        planned: samples that there should be.
    """

    variant: str
    task: Task
    records: list[Json]
    failed: int
    planned: int
    query_aware: bool
    fingerprint: str
    question_kept: bool = False
    one_token: float = 0.0


def task_result(measured: Measured, summary: Summary | None = None) -> TaskResult:
    """Put one variant's records on one task together; `delta` is not known yet.

    Args:
        summary: of the records, where they have been summarised already.
    """
    task, records = measured.task, measured.records
    summary = summary or summarise(measured) or Summary({})
    headline = summary.metrics.get(task.metric)
    return TaskResult(
        variant=measured.variant,
        task=task.name,
        version=task.version,
        metric=task.metric,
        value=None if headline is None else _finite(headline.value),
        n=0 if headline is None else headline.n,
        stderr=None if headline is None else _finite(headline.stderr),
        delta=None,
        best=task.best,
        lower_is_better=task.lower_is_better,
        droppable=task.droppable,
        query_aware=measured.query_aware,
        keep_question=measured.question_kept,
        protocol=_protocol(task, records),
        settings=task.model_dump(mode="json", exclude={"name"}),
        fingerprint=measured.fingerprint,
        failed=measured.failed,
        one_token=measured.one_token,
        metrics=[MetricEntry(name=k, **_entry(number)) for k, number in summary.metrics.items()],
        cells=[CellEntry(at=dict(at), **_entry(number)) for at, number in summary.cells],
        curves=[CurveEntry(name=k, **asdict(curve)) for k, curve in summary.curves.items()],
        cost=_cost([record["cost"] for record in records if "cost" in record]),
    )


def summarise(measured: Measured) -> Summary | None:
    """Score records; None where there are none.

    Raises:
        KvtoolError: the task cannot, since they are not what it has recorded: a reference that is
            no number where one is compared, a kind of question that is not there.
    """
    if not measured.records:
        return None
    try:
        return measured.task.summarise(measured.records)
    except KvtoolError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise KvtoolError(
            f"{measured.variant}, {measured.task.name}: the records cannot be scored: "
            f"{type(error).__name__} {error}",
            hint="delete the file of samples, or start anew with --overwrite",
        ) from error


def _protocol(task: Task, records: list[Json]) -> str:
    """Return what the samples say of their prompts, where it depends on the data, else the task."""
    facts = records[0].get("facts", {}) if records else {}
    return facts.get("protocol") or task.protocol


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _entry(number: Statistic) -> dict[str, Any]:
    return {"value": _finite(number.value), "n": number.n, "stderr": _finite(number.stderr)}


_MEANS = (
    *("prompt_tokens", "new_tokens", "kept_tokens", "kv_bytes", "state_bytes", "full_bytes"),
    *("traffic_pairs", "traffic_bytes"),
)


def _cost(costs: Sequence[Json]) -> Cost | None:
    costs = [cost for cost in costs if "kv_bytes" in cost]
    if not costs:
        return None

    def mean(name: str) -> float:
        return statistics.fmean(cost[name] for cost in costs)

    def rate(tokens: str, seconds: str) -> float | None:
        total = sum(cost[seconds] for cost in costs)
        count = sum(cost[tokens] for cost in costs)
        return count / total if total > 0 and count > 0 else None

    def if_all(name: str) -> float | None:
        return mean(name) if all(cost.get(name) is not None for cost in costs) else None

    peaks = [cost["peak_memory_bytes"] for cost in costs]
    rows = max(cost.get("batch", 1) for cost in costs)
    return Cost(
        **{name: mean(name) for name in _MEANS},
        peak_kv_bytes=max(cost["peak_kv_bytes"] for cost in costs),
        peak_memory_bytes=None if None in peaks else max(peaks),
        prefill_s=mean("prefill_s"),
        decode_s=mean("decode_s"),
        prefill_tokens_per_s=rate("prompt_tokens", "prefill_s"),
        decode_tokens_per_s=rate("decoded_tokens", "decode_s") if rows == 1 else None,
        batch=rows if rows > 1 else None,
        allocated_bytes=if_all("allocated_bytes"),
        evicted_share=if_all("evicted"),
        host_bytes=if_all("host_bytes"),
        kept_per_layer=_mean_per_layer([cost.get("kept_per_layer") or [] for cost in costs]),
    )


def _mean_per_layer(kept: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of each layer; nothing where samples do not have the same layers."""
    if len({len(layers) for layers in kept}) != 1:
        return []
    return [statistics.fmean(layer) for layer in zip(*kept, strict=True)]


def with_deltas(results: Sequence[TaskResult]) -> list[TaskResult]:
    """Fill in each result's difference to the full cache on the same task.

    It is None where either is missing, one has samples that the other has not, or one was fed a
    text in blocks and the other token by token. Within a block, tokens see each other whatever the
    policy evicts.
    """
    full = {result.task: result for result in results if is_baseline(result.variant)}
    compared = []
    for result in results:
        delta = _delta(result, full.get(result.task))
        compared.append(result.model_copy(update={"delta": delta}))
    return compared


def _delta(result: TaskResult, full: TaskResult | None) -> float | None:
    if full is None or full.value is None or result.value is None:
        return None
    if full.n != result.n or not result.fed_like(full):
        return None
    return result.value - full.value


def is_baseline(variant: str) -> bool:
    """Return whether a variant is the full cache, by its name."""
    return variant == BASELINE or variant.startswith(f"{BASELINE},")


def averages(results: Sequence[TaskResult]) -> list[Average]:
    """Return, per variant and suite, the mean headline of two or more tasks without failures."""
    groups: dict[tuple[str, str], list[TaskResult]] = defaultdict(list)
    for result in results:
        suite, slash, _ = result.task.partition("/")
        if slash and result.best is not None:
            groups[result.variant, suite].append(result)
    found = []
    for (variant, suite), members in groups.items():
        same = len({(member.best, member.lower_is_better) for member in members}) == 1
        values = [member.value for member in members if member.value is not None]
        lacking = len(values) < len(members) or any(member.failed for member in members)
        if len(members) < 2 or not same or lacking:
            continue
        deltas = [member.delta for member in members if member.delta is not None]
        found.append(
            Average(
                variant=variant,
                suite=suite,
                tasks=[member.task for member in members],
                value=statistics.fmean(values),
                delta=statistics.fmean(deltas) if len(deltas) == len(members) else None,
            )
        )
    return found
