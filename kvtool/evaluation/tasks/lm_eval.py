"""Tasks of the lm-evaluation-harness, answered through a compressed cache.

https://github.com/EleutherAI/lm-evaluation-harness, from 0.4.12 on. The harness is used as a
library: kvtool finds and loads its tasks, and keeps it from printing. It gives prompts, filters,
metrics and aggregation. kvtool answers the requests itself, so that every one of them meets the
evicting cache. A context is a prompt, a continuation is fed token by token after it, and a text
whose likelihood is wanted is followed as a perplexity is. Few-shot examples are those of the
harness' own command line at seed 0. As there, a prompt too long for the model loses its beginning,
and no chat template goes around it. Other than there, a text whose likelihood is wanted begins with
one `<bos>` even where the tokenizer adds one by itself; the harness' own model then reads two.

Requests that cannot be answered faithfully are refused: pictures and sound, tasks that run
generated code, sampling with top-p or several answers per prompt, beam search.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import io
import json
import logging
import math
import os
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, NonNegativeInt

from kvtool.errors import KvtoolError, UsageError, did_you_mean
from kvtool.evaluation.metrics.summary import Statistic, Summary, mean
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter
from kvtool.evaluation.tasks.task import Samples, Task

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import Task as HarnessTask
    from lm_eval.tasks import TaskManager

    from kvtool.evaluation.bench.bench import Bench


_SEED = 1234  # of few-shot examples and numpy, where the harness' user names none
_LISTED = 20


@dataclass(frozen=True)
class Prepared:
    """A task of the harness with its requests by document."""

    task: HarnessTask
    documents: dict[int, list[Instance]]


@lru_cache(maxsize=64)
def prepare(
    name: str, include_path: str | None, fewshot: int | None, limit: int | None, seed: int
) -> Prepared:
    """Load a task and build the requests of its first `limit` documents.

    Args:
        seed: 0 gives the few-shot examples of the harness' own command line.

    Raises:
        UsageError: no such task, a group of tasks, one that kvtool cannot answer.
        KvtoolError: its data cannot be read, or the task fails otherwise.
    """
    manager = _manager_of(name, include_path)
    try:
        with contained(seed):
            task = next(iter(manager.load(name)["tasks"].values()))
            _set_shots(name, task, fewshot)
            task.set_fewshot_seed(_SEED + seed)
            task.build_all_requests(limit=limit)
    except KvtoolError:
        raise
    except Exception as error:  # any: a task of the harness is a program
        reason = " ".join(str(error).split()) or type(error).__name__
        offline = "its data set must be cached on this machine or reachable"
        raise KvtoolError(
            f"lm-eval/{name} cannot be prepared: {reason}",
            hint=offline if isinstance(error, OSError) else None,
        ) from error
    documents: dict[int, list[Instance]] = defaultdict(list)
    for instance in task.instances:
        documents[instance.doc_id].append(instance)
    return Prepared(task, dict(documents))


def _manager_of(name: str, include_path: str | None) -> TaskManager:
    """Return the task list that knows a name: one's own first, then the harness'."""
    folders = [None] if include_path is None else [include_path, None]
    if include_path is not None and not Path(include_path).is_dir():
        raise UsageError(f"include_path: folder `{include_path}` does not exist")
    known: list[str] = []
    for folder in folders:
        manager = _manager(folder)
        entry = manager.task_index.get(name)
        if entry is not None and entry.kind.name in ("GROUP", "TAG"):
            members = [f"lm-eval/{member}" for member in _members(manager, name)]
            listed = ",".join(members[:_LISTED]) + (",.." if len(members) > _LISTED else "")
            raise UsageError(f"lm-eval/{name} is a group of tasks", hint=f"its members: {listed}")
        if entry is not None:
            _check(name, entry.cfg or {})
            return manager
        known += manager.all_subtasks
    raise UsageError(
        f"the lm-evaluation-harness has no task `{name}`", hint=did_you_mean(name, known)
    )


@lru_cache(maxsize=8)
def _manager(folder: str | None) -> TaskManager:
    """Read the tasks of a folder, or the harness' own, which takes seconds."""
    from lm_eval.tasks import TaskManager

    with contained():
        return TaskManager(include_path=folder, include_defaults=folder is None)


def _members(manager: TaskManager, name: str) -> list[str]:
    """List the tasks of a group and of the groups in it."""
    entry = manager.task_index.get(name)
    if entry is None or entry.kind.name not in ("GROUP", "TAG"):
        return [name]
    listed = sorted(entry.tags) if entry.kind.name == "TAG" else entry.cfg["task"]
    names = [
        item if isinstance(item, str) else item.get("task", item.get("group")) for item in listed
    ]
    return [member for child in names for member in _members(manager, child)]


def _check(name: str, config: dict[str, Any]) -> None:
    refused = {
        "doc_to_image": "shows pictures",
        "doc_to_audio": "plays sound",
        "unsafe_code": "runs code that the model writes",
    }
    for key in refused.keys() & config.keys():
        if config[key]:
            raise UsageError(f"lm-eval/{name} {refused[key]}, which kvtool does not")


def _set_shots(name: str, task: HarnessTask, fewshot: int | None) -> None:
    """Set the number of few-shot examples as the harness does: not where the task's own is 0."""
    own = task.get_config("num_fewshot")
    if fewshot is None:
        task.set_config("num_fewshot", own or 0)
    elif own == 0 and fewshot > 0:
        raise UsageError(f"lm-eval/{name} takes no examples, got fewshot {fewshot}")
    else:
        task.set_config("num_fewshot", fewshot)


@contextmanager
def contained(seed: int = 0) -> Iterator[None]:
    """Keep what the harness prints, logs and draws away from everyone else."""
    logger, one_process = logging.getLogger("lm_eval"), "DISABLE_MULTIPROC"
    level, states = logger.level, (random.getstate(), np.random.get_state())
    previous = os.environ.get(one_process)
    random.seed(seed)
    np.random.seed(_SEED + seed)
    logger.setLevel(logging.CRITICAL)
    os.environ[one_process] = "1"
    nowhere = io.StringIO()
    try:
        with warnings.catch_warnings(), redirect_stdout(nowhere), redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])
        os.environ.pop(one_process)
        if previous is not None:
            os.environ[one_process] = previous


def hash_of(document: Any) -> str:
    """Return what identifies a document."""
    text = json.dumps(document, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


Aggregation = Callable[[Sequence[Any]], float]

_NEW_TOKENS = 256  # of an answer, where a task does not say
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_RESAMPLES = 100  # for standard errors that have no formula; corpus metrics are slow
_OUT_OF_ONE = {"acc", "acc_norm", "acc_bytes", "exact_match", "em", "f1", "mcc"}


class LmEval(Task):
    """A task of the lm-evaluation-harness.

    Attributes:
        samples: number of documents, from the first; None: all.
        fewshot: examples in front of each question; None: as many as the task says.
        include_path: a folder with tasks of one's own, in the harness' YAML.
    """

    samples: Samples | None = None
    fewshot: Annotated[NonNegativeInt, Field(le=1_000_000)] | None = None
    include_path: str | None = None

    metric: ClassVar[str] = "score"
    chat: ClassVar[bool] = False
    extra: ClassVar[str | None] = "lm-eval"

    @property
    def protocol(self) -> str:
        """The harness' version, the task's, and which of its metrics is the score."""
        task = self._prepared.task
        return f"lm-eval {version('lm-eval')}, task version {task.VERSION}, {_headline(task)}"

    @property
    def lower_is_better(self) -> bool:
        """Whether a smaller headline is a better one, as the harness says."""
        task = self._prepared.task
        return not task.higher_is_better().get(_first_metric(task), True)

    @property
    def best(self) -> float | None:
        """1 for accuracies and the like; the harness does not say what others can reach."""
        return 1.0 if _first_metric(self._prepared.task) in _OUT_OF_ONE else None

    @property
    def _prepared(self) -> Prepared:
        harness_name = self.name.partition("/")[2]
        return prepare(harness_name, self.include_path, self.fewshot, self.samples, self.seed)

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        """Build the requests of every document.

        Raises:
            UsageError: no such task, a group of tasks, one that kvtool cannot answer.
            KvtoolError: its data cannot be read.
        """
        prepared = self._prepared
        for index, instances in prepared.documents.items():
            facts = {
                "document": index,
                "document_hash": hash_of(instances[0].doc),
                "task_version": str(prepared.task.VERSION),
                "requests": [_request(self.name, instance) for instance in instances],
            }
            yield Sample(str(index), "", facts=facts)

    def run(self, bench: Bench, sample: Sample) -> Json:
        """Answer every request of a document."""
        return {
            "document": sample.facts["document"],
            "document_hash": sample.facts["document_hash"],
            "responses": [_answer(bench, request) for request in sample.facts["requests"]],
        }

    def score(self, record: Json) -> dict[str, float]:
        """Return the harness' metrics of one document, as if it were the only one.

        Metrics that need several documents, such as F1 over labels, are left out, the headline too
        if it is one of them.

        Raises:
            KvtoolError: the document is no longer what it was when the model read it.
        """
        values = self._values(record)
        with contained(self.seed):
            alone = {name: _alone(self._aggregation(name), value) for name, value in values.items()}
        scores = {name: value for name, value in alone.items() if value is not None}
        headline = self._headline_among(values)
        return ({self.metric: scores[headline]} if headline in scores else {}) | scores

    def summarise(self, records: Sequence[Json]) -> Summary:
        """Put documents together as the harness does: means, corpus scores, perplexities."""
        values: dict[str, list[Any]] = defaultdict(list)
        for record in records:
            for name, value in self._values(record).items():
                values[name].append(value)
        with contained(self.seed):
            metrics = {k: _statistic(self._aggregation(k), items) for k, items in values.items()}
        headline = self._headline_among(metrics)
        is_mean = self._aggregation(headline) is _metrics().mean
        parts = [(float(each), 1.0) for each in values[headline]] if is_mean else []
        return Summary({self.metric: metrics[headline]} | metrics, parts=parts)

    def _headline_among(self, names: Mapping[str, Any]) -> str:
        """Return the headline's name; the first of the names where the task calls it otherwise."""
        headline = _headline(self._prepared.task)
        return headline if headline in names else next(iter(names))

    def _values(self, record: Json) -> dict[str, Any]:
        """Compute the harness' metrics of one document's responses, by `metric,filter`."""
        task, documents = self._prepared.task, self._prepared.documents
        index = record["document"]
        if index not in documents or hash_of(documents[index][0].doc) != record["document_hash"]:
            raise KvtoolError(
                f"{self.name}: document {index} is not the one that was answered",
                hint="the task or its data have changed since; run it again",
            )
        answered = [
            dataclasses.replace(instance, resps=_repeat(instance, response), filtered_resps={})
            for instance, response in zip(documents[index], record["responses"], strict=True)
        ]
        values: dict[str, Any] = {}
        with contained(self.seed):
            for pipeline in task._filters:
                pipeline.apply(answered)
                filtered = [instance.filtered_resps[pipeline.name] for instance in answered]
                results = task.process_results(copy.deepcopy(answered[0].doc), filtered)
                values |= {f"{name},{pipeline.name}": value for name, value in results.items()}
        return values

    def _aggregation(self, name: str) -> Aggregation:
        """Return how the harness aggregates `metric,filter`; the mean if it does not say."""
        known = self._prepared.task.aggregation()
        return known.get(name.rpartition(",")[0], _metrics().mean)


# ---- metrics


def _metrics() -> Any:
    from lm_eval.api import metrics

    return metrics


def _first_metric(task: HarnessTask) -> str:
    return next(iter(task.aggregation()))


def _headline(task: HarnessTask) -> str:
    """Return the name of the task's first metric after its first filter."""
    return f"{_first_metric(task)},{task._filters[0].name}"


def _alone(aggregation: Aggregation, value: Any) -> float | None:
    corpus = (_metrics().f1_score, _metrics().matthews_corrcoef)
    return None if aggregation in corpus else _computed(aggregation, [value])


def _statistic(aggregation: Aggregation, values: Sequence[Any]) -> Statistic:
    """Aggregate values, with a standard error resampled where it has no formula."""
    if aggregation is _metrics().mean:
        return mean([float(value) for value in values])
    spread = _metrics().stderr_for_metric(aggregation, _RESAMPLES) if len(values) > 1 else None
    value = _computed(aggregation, values)
    return Statistic(
        value=math.nan if value is None else value,
        n=len(values),
        stderr=None if spread is None or value is None else _computed(spread, values),
    )


def _computed(aggregation: Aggregation, values: Sequence[Any]) -> float | None:
    """Aggregate values to a finite number; None if these documents do not define it."""
    try:
        value = float(aggregation(values))
    except Exception:  # any: tasks bring functions of their own, which may need more documents
        return None
    return value if math.isfinite(value) else None


# ---- requests and answers


def _request(name: str, instance: Instance) -> Json:
    """Turn a request into JSON values."""
    kind = instance.request_type
    if kind == "loglikelihood":
        context, continuation = instance.args
        return {"type": kind, "context": context, "continuation": continuation}
    if kind == "loglikelihood_rolling":
        return {"type": kind, "text": instance.args[0]}
    context, options = instance.args
    return {"type": kind, "context": context, **_generation(name, dict(options), instance.repeats)}


def _generation(name: str, options: dict[str, Any], repeats: int | None) -> Json:
    """Translate a task's options of generation, or refuse them."""
    until = options.pop("until", None) or []
    lengths = [options.pop(key, None) for key in _LENGTHS]
    temperature = float(options.pop("temperature", None) or 0.0)
    if not options.pop("do_sample", temperature > 0):
        temperature = 0.0
    if options.get("num_beams") == 1:
        del options["num_beams"]
    if temperature == 0.0:
        options.pop("top_p", None)  # what is most likely stays so
        options.pop("top_k", None)
    elif (repeats or 1) > 1:
        raise UsageError(f"{name} samples {repeats} answers to a prompt, which kvtool does not")
    if options:
        listed = ", ".join(f"{key}={value}" for key, value in options.items())
        raise UsageError(f"{name} generates with {listed}, which kvtool does not offer")
    return {
        "until": [until] if isinstance(until, str) else [text for text in until if text],
        "max_new_tokens": next((int(n) for n in lengths if n is not None), _NEW_TOKENS),
        "temperature": temperature,
    }


def _answer(bench: Bench, request: Json) -> Any:
    """Answer with a text, [log-probability, whether it is likeliest], or a log-probability."""
    if request["type"] == "loglikelihood":
        return list(bench.loglikelihood(request["context"], request["continuation"]))
    if request["type"] == "loglikelihood_rolling":
        return bench.rolling(request["text"])
    return bench.generate(
        request["context"],
        max_new_tokens=request["max_new_tokens"],
        stop=tuple(request["until"]),
        temperature=request["temperature"],
    )


def _repeat(instance: Instance, response: Any) -> list[Any]:
    """Repeat the response as often as the task wants it, as the type that the harness has."""
    value = tuple(response) if isinstance(response, list) else response
    return [value] * (instance.repeats or 1)
