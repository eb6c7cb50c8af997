"""A run: variants and tasks in, a folder with every sample and the results out.

A run goes on from the records in its folder, unless they are of other inputs.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from kvtool.cache.files.format import weights_fingerprint
from kvtool.documents.claim import Claim
from kvtool.documents.results import (
    ModelUsed,
    ProtocolEntry,
    ResultsDocument,
    SamplesDocument,
    TaskSamples,
)
from kvtool.documents.settings import Protocol
from kvtool.documents.verdict import WITHIN
from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.claims import judge_claim
from kvtool.evaluation.guarantee import with_guarantee
from kvtool.evaluation.pairs import compare, variant_entry
from kvtool.evaluation.run.collect import Measured, averages
from kvtool.evaluation.run.environment import environment, git_commit, model_used
from kvtool.evaluation.run.fingerprint import (
    WAYS_OUT,
    difference,
    fingerprint,
    model_digest,
    text_hash,
)
from kvtool.evaluation.run.gates import Gate, judge
from kvtool.evaluation.run.index import (
    RESULTS,
    SAMPLES,
    check_record,
    compared_results,
    gates_of,
    of_this_run,
    read_results,
    read_samples,
    read_task,
    read_variant,
    sample_names,
    task_entry,
    unfinished,
)
from kvtool.evaluation.run.runner import Job, Measurement, Place, Step, run_measurements, sample_key
from kvtool.evaluation.run.store import Store
from kvtool.evaluation.samples.sample import Json
from kvtool.evaluation.tasks.task import Task
from kvtool.evaluation.verdict import differences, make_verdict
from kvtool.planning.variants import Variant
from kvtool.version import VERSION

if TYPE_CHECKING:
    from kvtool.models.load import Loaded


_KEYS_SINCE = "0.1.0"  # of kvtool; part of every record's key, so that a release keeps records


@dataclass(frozen=True)
class Resumed:
    """What a folder holds for a run.

    Attributes:
        unknown: finished measurements of an earlier kvtool, which do not say by what code.
        stale: why the folder cannot be gone on from; None: it can.
    """

    unknown: int = 0
    stale: UsageError | None = None


def _sample_name(sample: str, cell: object) -> str:
    return json.dumps([sample, cell or {}], sort_keys=True)


@dataclass(frozen=True)
class Run:
    """One comparison and its folder.

    Attributes:
        store: the folder, which the caller holds locked.
        index: variants, tasks and samples.
        head: results, of which all that says about the run as a whole is kept.
        within: percent of the full cache's score, for the verdict.
    """

    store: Store
    index: SamplesDocument
    head: ResultsDocument
    gates: Sequence[Gate]
    within: float
    variants: Sequence[Variant]
    tasks: Sequence[Task]
    model_digest: str = ""

    @cached_property
    def _place(self) -> Place:
        protocol = Protocol(**self.index.protocol.model_dump())
        return Place(self.index.model, protocol, self.model_digest)

    @classmethod
    def plan(
        cls,
        store: Store,
        *,
        name: str,
        argv: Sequence[str],
        loaded: Loaded,
        variants: Sequence[Variant],
        jobs: Sequence[Job],
        protocol: Protocol,
        gates: Sequence[Gate],
        within: float = WITHIN,
        guarantee: float | None = None,
        claim: Claim | None = None,
        pairs: Sequence[str] = (),
    ) -> Run:
        """Return what will be measured; nothing is written yet."""
        used = model_used(loaded)
        before = read_results(store)
        index = SamplesDocument(
            model=_identity(loaded, used),
            protocol=ProtocolEntry(**asdict(protocol)),
            variants=[variant_entry(variant) for variant in variants],
            tasks=[task_entry(job) for job in jobs],
            guarantee=guarantee,
        )
        plan = next((variant.plan for variant in variants if variant.plan is not None), None)
        index = index.model_copy(update={"plan": plan})  # as a field it would be validated again
        now = _now()
        head = ResultsDocument(
            name=name,
            kvtool=VERSION,
            git_commit=git_commit(),
            argv=list(argv),
            started=now if before is None else before.started,
            finished=now,
            complete=False,
            environment=environment(),
            model=used,
            seed=protocol.seed,
            variants=index.variants,
            results=[],
            averages=[],
            gates=[],
            claim=claim,
            pairs=list(pairs),
        )
        return cls(
            store,
            index,
            head,
            gates=gates,
            within=within,
            variants=variants,
            tasks=[job.task for job in jobs],
            model_digest=model_digest(loaded),
        )

    def start(self) -> None:
        """Write down what will be measured, and results as they are; the first process does."""
        if self.store.process == 0:
            self.store.write(SAMPLES, self.index.to_json())
            self.write_results()

    def look_at_records(self, jobs: Sequence[Job]) -> Resumed:
        """Hold the records in the folder against what they would depend on now.

        A record without a fingerprint counts if its key is the one that it would have now.
        """
        unknown = 0
        for job, variant in product(jobs, self.variants):
            shared = self._place.shared_fingerprint(variant, job.task)
            configuration = self._place.configuration(variant, job.task)
            there: dict[str, list[Json]] = defaultdict(list)
            for record in self.store.records(variant.folder, job.task.name).values():
                if record.get("error") is None:
                    there[_sample_name(record["id"], record.get("cell"))].append(record)
            for sample, content in zip(job.samples, job.hashes, strict=True):
                now, key = fingerprint(shared, content), sample_key(configuration, content)
                for record in there.get(_sample_name(sample.id, dict(sample.cell)), ()):
                    found = record.get("fingerprint")
                    if found is None:
                        unknown += record["key"] == key
                    elif (message := difference(found, now)) is not None:
                        message = (
                            f"`{self.store.folder}` holds an answer of `{variant.name}` to sample "
                            f"`{sample.id}` of {job.task.name} that {message}"
                        )
                        return Resumed(stale=UsageError(message, hint=WAYS_OUT))
        return Resumed(unknown)

    @classmethod
    def open(
        cls,
        store: Store,
        gates: Sequence[Gate] | None = None,
        within: float | None = None,
        pairs: Sequence[str] | None = None,
    ) -> Run:
        """Read a run back, to make its results anew; no model is needed.

        Args:
            gates, within, pairs: in place of those of the run.

        Raises:
            UsageError: the folder holds no run, or one of another schema version; a task's scores
                need a package that is not installed.
        """
        results = read_results(store)
        if results is None:
            raise UsageError(f"`{store.folder}` holds no run (no {RESULTS})")
        index = read_samples(store)
        if within is None:
            within = WITHIN if results.verdict is None else results.verdict.within
        return cls(
            store,
            index,
            results if pairs is None else results.model_copy(update={"pairs": list(pairs)}),
            gates=gates or gates_of(results),
            within=within,
            variants=[read_variant(entry, index.plan) for entry in index.variants],
            tasks=[read_task(entry, store) for entry in index.tasks],
        )

    def unfinished(self, jobs: Sequence[Job]) -> list[Measurement]:
        """Return what is not done, in the order in which it will be."""
        return unfinished(jobs, self.variants, self._place, self.store)

    def check_same(self, model: dict[str, Any]) -> None:
        """Refuse to share a run with a process that measures something else.

        Args:
            model: `index.model` of the first process.

        Raises:
            UsageError: other weights, another kernel, another kvtool ..
        """
        for name, value in model.items():
            own = self.index.model.get(name)
            if own != value:
                raise UsageError(
                    f"process {self.store.process} measures another model than process 0: {name} "
                    f"is `{own}`, not `{value}`"
                )

    def measure(
        self,
        measurements: Sequence[Measurement],
        jobs: Sequence[Job],
        loaded: Loaded,
        on_step: Callable[[Step], None],
        *,
        stop_on_error: bool = False,
    ) -> None:
        """Measure; the results are written at the end, however it comes.

        Raises:
            KvtoolError: a sample failed and `stop_on_error` is set.
        """
        variants, place = self.variants, self._place
        steps = run_measurements(measurements, jobs, variants, loaded, place, self.store)
        try:
            for step in steps:
                if step.error is not None and stop_on_error:
                    raise KvtoolError(step.shown)
                on_step(step)
        finally:
            if self.store.process == 0:
                self.write_results()

    def write_results(self) -> ResultsDocument:
        """Put together what has been measured so far, and write it."""
        results = self.results()
        self.store.write(RESULTS, results.to_json())
        return results

    def results(self) -> ResultsDocument:
        """Put together what has been measured so far."""
        entries = zip(self.tasks, self.index.tasks, strict=True)
        measured = [
            self._measured(variant, task, entry)
            for task, entry in entries
            for variant in self.variants
        ]
        results = compared_results(measured)
        verdict = make_verdict(results, self.index.variants, self.within)
        done = sum(len(each.records) + each.failed for each in measured)
        document = self.head.model_copy(
            update={
                "kvtool": VERSION,
                "finished": _now(),
                "complete": done == sum(each.planned for each in measured),
                "variants": [variant_entry(variant) for variant in self.variants],
                "results": results,
                "averages": averages(results),
                "gates": judge(self.gates, results),
                "verdict": with_guarantee(verdict, results, self.index),
                "samples": sample_names(measured),
                "differences": differences(results, self.index.variants),
            }
        )
        asked = compare(document, document.pairs) if document.pairs else []
        more = {
            "differences": [*asked, *document.differences],
            "claim_verdict": document.claim and judge_claim(document.claim, document),
        }
        return document.model_copy(update=more)

    def _measured(self, variant: Variant, task: Task, entry: TaskSamples) -> Measured:
        if task.version != entry.version:
            raise UsageError(
                f"`{self.store.folder}` holds version {entry.version} of task `{entry.task}`, "
                f"this kvtool has version {task.version}",
                hint="start anew in another folder",
            )
        configuration = self._place.configuration(variant, task)
        records = self.store.records(variant.folder, entry.task)
        for record in records.values():
            if record.get("error") is None:
                check_record(self.store.path(variant.folder, task.name), task, record)
        done, failed = of_this_run(records, configuration, entry)
        return Measured(
            variant=variant.name,
            task=task,
            records=[record for _, record in done],
            failed=failed,
            planned=len(entry.samples),
            query_aware=task.knows_query(self._place.protocol),
            question_kept=task.keeps_question(self._place.protocol),
            fingerprint=entry.fingerprint,
            one_token=entry.one_token,
        )


def _identity(loaded: Loaded, used: ModelUsed) -> dict[str, Any]:
    """Return what identifies these weights and this way of running them."""
    names = ("id", "revision", "config_hash", "dtype", "device", "attn_implementation")
    hashes = {"weights": weights_fingerprint(loaded.model), "text": text_hash(loaded)}
    known = {name: getattr(used, name) for name in names}
    return known | hashes | {"kvtool": _KEYS_SINCE}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
