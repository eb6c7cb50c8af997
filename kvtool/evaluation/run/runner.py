"""Run every sample under every variant, a line in a file for each, and skip those already there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvtool.documents.settings import Protocol
from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.run.fingerprint import Fingerprint, code_digests, digest, fingerprint
from kvtool.evaluation.run.store import Store
from kvtool.evaluation.samples.questions import one_token_share
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter
from kvtool.evaluation.tasks.task import Task
from kvtool.planning.variants import Variant
from kvtool.policies.source import class_sources

if TYPE_CHECKING:
    from kvtool.evaluation.bench.bench import Bench
    from kvtool.models.load import Loaded

_BATCHES = 4  # of samples that run under one variant before the next
WHICH_SAMPLES = frozenset({"name", "seed", "samples", "lengths", "depths", "data", "digits"})
"""Settings that only choose samples; what a sample holds is in its key by itself."""


@dataclass(frozen=True)
class Job:
    """A task and its samples, each with the hash of its content.

    Attributes:
        one_token: share of its questions whose right answers are one token.
    """

    task: Task
    samples: list[Sample]
    hashes: list[str]
    one_token: float = 0.0

    @property
    def fingerprint(self) -> str:
        """One hash of all samples."""
        return _hash(self.hashes)

    @property
    def contexts(self) -> list[int]:
        """The number of each sample's context, which samples may share."""
        keys = [(each.context, not each.context and each.id) for each in self.samples]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        return [numbers[key] for key in keys]


@dataclass(frozen=True)
class Place:
    """What of a measurement is not in its sample: model, variant, task and protocol.

    Attributes:
        model: what identifies the weights and the way they run.
        model_digest: of all that decides on its answers; empty where none are recorded.
    """

    model: dict[str, Any]
    protocol: Protocol
    model_digest: str = ""

    def configuration(self, variant: Variant, task: Task) -> str:
        """Return the hash of everything but the sample."""
        return _hash({"model": self.model, **self._settings(variant, task)})

    def _settings(self, variant: Variant, task: Task) -> dict[str, Any]:
        protocol = self.protocol.identity()
        plan = None if variant.plan is None else json.dumps(variant.plan.to_data(), sort_keys=True)
        return {
            "policy": str(variant.policy),
            "budget": None if variant.budget is None else str(variant.budget),
            "prefill": variant.prefill,
            "plan": plan,
            "task": task.name,
            "version": task.version,
            "settings": task.model_dump(mode="json", exclude=set(WHICH_SAMPLES)),
            "protocol": {name: protocol[name] for name in sorted(protocol)},
        }

    def shared_fingerprint(self, variant: Variant, task: Task) -> Fingerprint:
        """Return the fingerprint of a task's records under a variant, but for their prompts."""
        known: Any = self._settings(variant, task)
        own = class_sources(type(task))  # of a task of the user's own
        settings = digest([known, own] if own else known)
        return {"settings": settings, "model": self.model_digest} | code_digests(variant.policy)


def draw_jobs(tasks: Sequence[Task], tokens: TokenCounter, limit: int | None) -> list[Job]:
    """Draw or read the samples of every task.

    Raises:
        UsageError: a task that is given more tokens than the model was trained for, one without
            any sample, one twice.
        KvtoolError: data that cannot be read.
    """
    jobs = []
    for task in tasks:
        longest = max(getattr(task, "lengths", None) or (0,))
        if tokens.limit is not None and longest > tokens.limit:
            raise UsageError(
                f"{task.name}: {longest} tokens are more than the {tokens.limit} positions that "
                "the model was trained for",
                hint=f"--lengths {tokens.limit} or less",
            )
        samples = list(task.draw(tokens)) if limit is None else task.draw_some(tokens, limit)
        if not samples:
            raise UsageError(f"{task.name}: no samples")
        ids = [sample.id for sample in samples]
        if len(set(ids)) < len(ids):
            twice = next(name for name in ids if ids.count(name) > 1)
            raise KvtoolError(f"{task.name}: two samples are called `{twice}`")
        hashes = [_hash(asdict(sample)) for sample in samples]
        jobs.append(Job(task, samples, hashes, one_token_share(samples, tokens)))
    return jobs


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def sample_key(configuration: str, content: str) -> str:
    """Return what identifies a finished measurement."""
    return _hash([configuration, content])


@dataclass(frozen=True)
class Measurement:
    """One sample under one variant.

    Attributes:
        job, sample, variant: its places in the lists of the run.
        work: how long it takes beside the others, roughly.
    """

    job: int
    sample: int
    variant: int
    work: int


@dataclass(frozen=True)
class Step:
    """One measurement that is done, for whoever shows progress."""

    variant: str
    task: str
    sample: str
    error: str | None

    @property
    def shown(self) -> str:
        """Say where a measurement failed, and why."""
        return f"{self.task}, sample {self.sample}, {self.variant}: {self.error}"


def run_measurements(
    measurements: Sequence[Measurement],
    jobs: Sequence[Job],
    variants: Sequence[Variant],
    loaded: Loaded,
    place: Place,
    store: Store,
) -> Iterator[Step]:
    """Measure one after the other; yield a step for each once its line is written.

    A sample runs under all variants before the next one. Of samples whose answers are decoded
    together, a few batches run under one variant before the next.
    """
    from kvtool.evaluation.bench.bench import Bench
    from kvtool.evaluation.bench.shared import SharedPrompts
    from kvtool.evaluation.bench.together import decode_together, joins

    shared: dict[str, Any] = {}
    prompts = SharedPrompts() if place.protocol.shared_prefill else None
    benches = [Bench(loaded, variant, place.protocol, shared, prompts) for variant in variants]
    keys = {
        (v, j): (
            place.configuration(variant, job.task),
            place.shared_fingerprint(variant, job.task),
        )
        for v, variant in enumerate(variants)
        for j, job in enumerate(jobs)
    }
    sizes = [job.task.largest_batch(place.protocol) for job in jobs]
    batched = {v for v, bench in enumerate(benches) if max(sizes, default=1) > 1 and joins(bench)}

    def group(each: Measurement) -> tuple[int, int, int]:
        size, turns = sizes[each.job], jobs[each.job].samples[each.sample].turns
        if size == 1 or each.variant not in batched or len(turns) != 1:
            return each.job, each.sample, -1
        return each.job, each.sample - each.sample % (_BATCHES * size), each.variant

    def measure(each: Measurement) -> Step:
        job, variant = jobs[each.job], variants[each.variant]
        sample, content = job.samples[each.sample], job.hashes[each.sample]
        record = _measure(benches[each.variant], job.task, sample)
        configuration, shared_fingerprint = keys[each.variant, each.job]
        head: Json = {
            "key": sample_key(configuration, content),
            "configuration": configuration,
            "fingerprint": fingerprint(shared_fingerprint, content),
            "id": sample.id,
        } | ({"cell": dict(sample.cell)} if sample.cell else {})
        store.append(variant.folder, job.task.name, head | record)
        return Step(variant.name, job.task.name, sample.id, record.get("error"))

    for (j, s, v), of_group in groupby(sorted(measurements, key=group), key=group):
        task, left = jobs[j].task, dict(enumerate(of_group))
        shared.clear()
        for each in left.values():
            # of a compiled decode, other draws are another graph; of a batch, there are none
            draws = None if getattr(task, "compile", False) else jobs[j].hashes[s]
            benches[each.variant].draw_for(draws)
            benches[each.variant].warm_up()
        if prompts is not None:
            prompts.begin([benches[each.variant] for each in left.values()])
        if v >= 0:
            samples = [jobs[j].samples[each.sample] for each in left.values()]
            for i, shared["decoded"] in decode_together(benches[v], task, samples, sizes[j]):
                yield measure(left.pop(i))
        yield from map(measure, left.values())


def _measure(bench: Bench, task: Task, sample: Sample) -> Json:
    try:
        record = task.measure(bench, sample)
        record = record | {"scores": task.score({**record, "cell": dict(sample.cell)})}
        if not _is_finite(record):
            raise KvtoolError("a score or measurement is not a finite number")
        return record
    except Exception as error:  # any: a failing sample must not take the others with it
        message = " ".join(str(error).split())
        kind = "" if isinstance(error, KvtoolError) else f"{type(error).__name__}: "
        return {"error": f"{kind}{message}"}


def _is_finite(record: Json) -> bool:
    """Return whether JSON can hold the numbers, unlike those of a model whose logits overflow."""
    try:
        json.dumps(record, allow_nan=False)
    except ValueError:
        return False
    return True
