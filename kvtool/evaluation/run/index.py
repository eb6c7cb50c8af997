"""Index a run's folder: its variants, tasks, samples and results, and what is still to be measured.

Every result holds the scores of its samples, compared with the full cache's. The part of a run that
is missing is divided among processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from kvtool.documents.document import Document
from kvtool.documents.plan import PlanDocument
from kvtool.documents.readers import load_json
from kvtool.documents.results import (
    ResultsDocument,
    SamplesDocument,
    TaskResult,
    TaskSamples,
    VariantEntry,
)
from kvtool.documents.source import SCHEMA_VERSION, reason
from kvtool.documents.verdict import Interval, Paired, SampleScores
from kvtool.errors import KvtoolError, UsageError, quote
from kvtool.evaluation.metrics.summary import LINKS, Part, Summary
from kvtool.evaluation.run.collect import Measured, is_baseline, summarise, task_result, with_deltas
from kvtool.evaluation.run.gates import Gate
from kvtool.evaluation.run.runner import Job, Measurement, Place, sample_key
from kvtool.evaluation.run.store import Store
from kvtool.evaluation.samples.sample import Json
from kvtool.evaluation.tasks.table import task_class
from kvtool.evaluation.tasks.task import Task
from kvtool.evaluation.verdict import Estimate, between, mean_of, ratio, shared
from kvtool.extras import require
from kvtool.planning.variants import Variant, make_variants
from kvtool.policies.grammar import parse_policy
from kvtool.policies.outside import is_outside
from kvtool.sizes import Budget, spell_prefill

RECIPE, RESULTS, SAMPLES = "recipe.lock.yaml", "results.json", "samples.json"

Kind = TypeVar("Kind", bound=Document)


def read_results(store: Store) -> ResultsDocument | None:
    """Return the results in a run's folder, None if there are none.

    Raises:
        UsageError: they are of another schema version, or no results.
    """
    path = store.folder / RESULTS
    return read_results_file(path) if path.is_file() else None


def read_results_file(path: Path) -> ResultsDocument:
    """Return the results in a file; raises as `read_results`."""
    return _read(path, ResultsDocument, "results")


def read_samples(store: Store) -> SamplesDocument:
    """Return what a run measures.

    Raises:
        UsageError: there is no such document, or one of another schema version.
    """
    return _read(store.folder / SAMPLES, SamplesDocument, "samples")


def _read(path: Path, document: type[Kind], kind: str) -> Kind:
    try:
        data = load_json(path.read_bytes())
        known = isinstance(data, dict) and data.get("kind") == kind
        version = data.get("schema_version") if known else None
        if version != SCHEMA_VERSION:
            by = f" of this kvtool (schema_version {version}, not {SCHEMA_VERSION})"
            raise UsageError(
                f"`{path}` holds no {kind}{' of kvtool' if version is None else by}",
                hint="use the kvtool that wrote it, or another folder",
            )
        return document.model_validate(data)
    except KvtoolError:
        raise
    except OSError as error:
        raise UsageError(f"cannot read `{path}`: {error.strerror}") from None
    except ValueError as error:
        raise KvtoolError(f"`{path}` is damaged: {reason(error)}") from None


def read_variant(entry: VariantEntry, plan: PlanDocument | None) -> Variant:
    """Return the variant that a document describes.

    Raises:
        KvtoolError: its name is not the one of its policy and budget.
        UsageError: its policy or budget cannot be read, or its policy is of a module that is not
            imported.
    """
    variant = make_variants(
        [parse_policy(entry.policy, imports=False)],
        [] if entry.budget is None else [Budget.parse(entry.budget)],
        prefill=spell_prefill(entry.prefill),
        baseline=False,
        plan=plan if entry.planned else None,
    )[0]
    if variant.name != entry.name:
        raise KvtoolError(
            f"`{SAMPLES}` is damaged: it calls `{variant.name}` {quote(entry.name)}",
            hint="start anew with --overwrite",
        )
    return variant


def task_entry(job: Job) -> TaskSamples:
    """Describe a task and its samples in a document."""
    return TaskSamples(
        task=job.task.name,
        version=job.task.version,
        settings=job.task.model_dump(mode="json", exclude={"name"}),
        fingerprint=job.fingerprint,
        one_token=job.one_token,
        contexts=job.contexts,
        samples=[
            (sample.id, content) for sample, content in zip(job.samples, job.hashes, strict=True)
        ],
    )


def read_task(entry: TaskSamples, store: Store) -> Task:
    """Return the task that a document describes.

    Raises:
        KvtoolError: there is no such task, or its settings are not the task's.
        UsageError: its scores need a package that is not installed; it is of a module that is not
            imported.
    """
    try:
        task = task_class(entry.task).model_validate({**entry.settings, "name": entry.task})
    except (UsageError, ValidationError) as error:
        if isinstance(error, UsageError) and is_outside(entry.task):
            raise
        path = store.folder / SAMPLES
        raise KvtoolError(f"`{path}` is damaged: {entry.task}: {reason(error)}") from None
    if task.extra is not None:
        require(task.extra, needed_by=f"task `{entry.task}`")
    return task


def gates_of(results: ResultsDocument) -> list[Gate]:
    """Return the gates that results were checked by."""
    found = {}
    for gate in results.gates:
        limits = {"least": gate.limit} if gate.gate == "least" else {"max_drop": gate.limit}
        found[gate.gate, gate.task, gate.limit] = Gate(gate.task, **limits)
    return list(found.values())


def of_this_run(
    records: Mapping[str, Json], configuration: str, entry: TaskSamples
) -> tuple[list[tuple[str, Json]], int]:
    """Return ids and records of a run's samples, and how many failed; lines of others may stay."""
    keyed = [
        (name, records.get(sample_key(configuration, content))) for name, content in entry.samples
    ]
    found = [(name, record) for name, record in keyed if record is not None]
    done = [(name, record) for name, record in found if "error" not in record]
    return done, len(found) - len(done)


def check_record(path: Path, task: Task, record: Json) -> None:
    """Refuse a record, of the file at `path`, that lacks what the task's score needs."""
    if task.record is None:
        return
    try:
        task.record.model_validate(record)
    except ValidationError as error:
        raise KvtoolError(
            f"`{path}`: sample {quote(record['id'])} is no record of `{task.name}`: "
            f"{reason(error)}",
            hint="delete that line, or start anew with --overwrite",
        ) from None


def compared_results(measured: Sequence[Measured]) -> list[TaskResult]:
    """Score the records of all variants and tasks, each compared with the full cache's.

    Raises:
        KvtoolError: records that cannot be scored.
    """
    names, results = sample_names(measured), []
    for each in measured:
        summary = summarise(each)
        scores = _scores(each, summary, names[each.task.name])
        results.append(task_result(each, summary).model_copy(update={"scores": scores}))
    both = list(zip(measured, with_deltas(results), strict=True))
    full = {each.task.name: (each, found) for each, found in both if is_baseline(found.variant)}
    return [
        found.model_copy(update={"paired": _paired(each, found, full.get(each.task.name))})
        for each, found in both
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
    speed, gain = _speed(measured, full[0]), found.difference
    return Paired(
        n=found.n, full=score, difference=gain, low=found.low, high=found.high, speed=speed
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
        if cost.get("batch", 1) == 1
    }


def unfinished(
    jobs: Sequence[Job], variants: Sequence[Variant], place: Place, store: Store
) -> list[Measurement]:
    """Return what is not done, or has failed, sample by sample and variant by variant.

    A sample runs under every variant before the next one begins, so that a run that is broken off
    has compared all variants on the same samples.
    """
    left = []
    for j, job in enumerate(jobs):
        configurations = [place.configuration(variant, job.task) for variant in variants]
        records = [store.records(variant.folder, job.task.name) for variant in variants]
        for s, (sample, content) in enumerate(zip(job.samples, job.hashes, strict=True)):
            work = job.task.work(sample)
            for a, configuration in enumerate(configurations):
                record = records[a].get(sample_key(configuration, content))
                if record is None or "error" in record:
                    left.append(Measurement(j, s, a, work))
    return left


def partition_of(
    measurements: Sequence[Measurement], process: int, processes: int
) -> list[Measurement]:
    """Return the part of one of several processes.

    The list is cut into stretches of equal work. So the variants of a sample stay together, but for
    the samples at the cuts, and what the variants share about a sample is made once.

    >>> partition_of([Measurement(0, i, 0, work) for i, work in enumerate((1, 1, 1, 3))], 1, 2)
    [Measurement(job=0, sample=3, variant=0, work=3)]
    """
    total = sum(measurement.work for measurement in measurements)
    partition, before = [], 0
    for measurement in measurements:
        middle = 2 * before + measurement.work  # in halves
        if middle * processes // (2 * total) == process:
            partition.append(measurement)
        before += measurement.work
    return partition
