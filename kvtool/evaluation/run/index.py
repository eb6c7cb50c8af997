"""What the documents in a run's folder tell: its variants, tasks, samples and results."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from kvtool.documents.document import Document
from kvtool.documents.plan import PlanDocument
from kvtool.documents.readers import load_json
from kvtool.documents.results import ResultsDocument, SamplesDocument, TaskSamples, VariantEntry
from kvtool.documents.source import SCHEMA_VERSION, reason
from kvtool.documents.verdict import WITHIN
from kvtool.errors import KvtoolError, UsageError, quote
from kvtool.evaluation.bench.variants import Variant, make_variants
from kvtool.evaluation.run.gates import Gate
from kvtool.evaluation.run.runner import Job
from kvtool.evaluation.run.store import Store
from kvtool.evaluation.samples.sample import Json
from kvtool.evaluation.tasks.table import task_class
from kvtool.evaluation.tasks.task import Task
from kvtool.extras import require
from kvtool.policies.grammar import parse_policy
from kvtool.policies.spelling import part_name, spell_settings
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
    except OSError as error:
        raise UsageError(f"cannot read `{path}`: {error.strerror}") from None
    except ValueError as error:
        raise KvtoolError(f"`{path}` is damaged: {error}") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version is None or not isinstance(data, dict) or data.get("kind") != kind:
        raise UsageError(f"`{path}` holds no {kind} of kvtool")
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"`{path}` was written by another kvtool (schema_version {version}, "
            f"this one reads {SCHEMA_VERSION})",
            hint="use that kvtool, or another folder",
        )
    try:
        return document.model_validate(data)
    except ValidationError as error:
        raise KvtoolError(f"`{path}` is damaged: {reason(error)}") from None


def variant_entry(variant: Variant) -> VariantEntry:
    """Tell of a variant in a document."""
    size = variant.budget
    budget = None if size is None else size.tokens if size.tokens is not None else str(size)
    codec = variant.policy.codec
    return VariantEntry(
        name=variant.name,
        policy=str(variant.policy),
        budget=budget,
        prefill=variant.prefill,
        planned=variant.plan is not None,
        reads=variant.budget is not None and variant.policy.budget_is_traffic,
        codec=None if codec is None else part_name(codec) + spell_settings(codec),
    )


def read_variant(entry: VariantEntry, plan: PlanDocument | None) -> Variant:
    """Return the variant that a document tells of.

    Raises:
        KvtoolError: its name is not the one of its policy and budget.
        UsageError: its policy or budget cannot be read, or its policy is of a module that nobody
            has imported.
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
    """Tell of a task and its samples in a document."""
    return TaskSamples(
        task=job.task.name,
        version=job.task.version,
        settings=job.task.model_dump(mode="json", exclude={"name"}),
        fingerprint=job.fingerprint,
        samples=[
            (sample.id, content) for sample, content in zip(job.samples, job.hashes, strict=True)
        ],
    )


def read_task(entry: TaskSamples, store: Store) -> Task:
    """Return the task that a document tells of.

    Raises:
        KvtoolError: there is no such task, or its settings are not the task's.
        UsageError: its scores need a package that is not installed.
    """
    path = store.folder / SAMPLES
    try:
        kind = task_class(entry.task)
    except UsageError as error:
        raise KvtoolError(f"`{path}` is damaged: {error}") from None
    try:
        task = kind.model_validate({**entry.settings, "name": entry.task})
    except ValidationError as error:
        raise KvtoolError(f"`{path}` is damaged: {entry.task}: {reason(error)}") from None
    if task.extra is not None:
        require(task.extra, needed_by=f"task `{entry.task}`")
    return task


def gates_of(results: ResultsDocument) -> list[Gate]:
    """Return the gates that results were held against."""
    found = {}
    for gate in results.gates:
        limits = {"least": gate.limit} if gate.gate == "least" else {"max_drop": gate.limit}
        found[gate.gate, gate.task, gate.limit] = Gate(gate.task, **limits)
    return list(found.values())


def within_of(results: ResultsDocument) -> float:
    """Return the bound of the verdict of results, in percent of the full cache's score."""
    return WITHIN if results.verdict is None else results.verdict.within


def check_record(path: Path, task: Task, record: Json) -> None:
    """Refuse a record that lacks what the task's score needs.

    Args:
        path: of its file, for the error.

    Raises:
        KvtoolError: it does.
    """
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
