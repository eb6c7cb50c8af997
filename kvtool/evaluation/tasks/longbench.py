"""LongBench and LongBench-E: 16 English tasks on real long documents.

Bai et al., 2023, https://arxiv.org/abs/2308.14508, https://github.com/THUDM/LongBench. Answers are
scored as there. The data come in two layouts: raw, with `input`, `context` and `answers` in columns
of their own, and joined (`Xnhyacinth/LongBench` on the hub), whose columns together are LongBench's
own prompts. Raw data are put in our own words, in the same shape, unless LongBench's
`dataset2prompt.json` is given; scores under another wording differ a little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import yaml
from pydantic import PrivateAttr

from kvtool.documents.files import digest, expand
from kvtool.errors import KvtoolError, UsageError, did_you_mean
from kvtool.evaluation.metrics.code import code_sim
from kvtool.evaluation.metrics.text import (
    best,
    classification,
    count,
    first_line,
    qa_f1,
    retrieval,
    rouge_l,
)
from kvtool.evaluation.samples.data import PRESETS, Data, Rows, read_rows
from kvtool.evaluation.samples.data_files import load_json, read_by
from kvtool.evaluation.samples.questions import require
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import Asking
from kvtool.evaluation.tasks.task import Samples
from kvtool.package_data import data_file

_METRICS = {
    "qa_f1": qa_f1,
    "rouge_l": rouge_l,
    "count": count,
    "retrieval": retrieval,
    "code_sim": code_sim,
}
_RAW = ("context", "input", "answers")
_JOINED = ("context", "question", "answer_prefix", "answers")
_JOINED_SPARE = 20  # tokens that the joined data allow on top of LongBench's
_HERE = "\N{OBJECT REPLACEMENT CHARACTER}kvtool"  # stands for the context
_BUCKETS = ((4000, "0-4k"), (8000, "4-8k"))


@dataclass(frozen=True)
class Benchmark:
    """One task of LongBench, as `longbench_prompts.yaml` has it and explains it."""

    prompt: str
    max_new_tokens: int
    metric: str
    chat: bool = True
    first_line: bool = False
    one_line: bool = False


@cache
def benchmarks() -> dict[str, Benchmark]:
    """Return every task by its name in LongBench."""
    text = data_file("evaluation/tasks/longbench_prompts.yaml").read_text("utf-8")
    return {name: Benchmark(**entry) for name, entry in yaml.safe_load(text).items()}


def split_prompt(template: str, question: str) -> tuple[str, str]:
    """Fill in the question and return the texts before and after the context.

    >>> split_prompt("Text: {context} Question: {input}", "Why?")
    ('Text: ', ' Question: Why?')

    Raises:
        UsageError: the template lacks `{context}`, has it twice, or other fields.
    """
    try:
        before, after = template.format(context=_HERE, input=question).split(_HERE)
    except (ValueError, LookupError, AttributeError) as error:
        raise UsageError(
            f"a prompt must have {{context}} once, and {{input}}: {error}",
            hint="other braces are doubled",
        ) from None
    return before, after


class LongBench(Asking):
    """One task of LongBench (`longbench/qasper`) or of LongBench-E (`longbench_e/qasper`).

    The closing instruction, the question and the cue for the answer are the question of a sample,
    so that the context can be compressed without them. The cue belongs to the user's message, also
    inside a chat template, as in LongBench.

    Attributes:
        data: a file, a folder with `qasper.jsonl` or `qasper_e.jsonl`, or a dataset on the hub.
        prompts: LongBench's `dataset2prompt.json`, or another JSON file of prompts by task.
        samples: how many, from the first on; all by default.
    """

    data: Data | None = None
    prompts: str | None = None
    samples: Samples | None = None

    metric: ClassVar[str] = "score"

    _joined: bool | None = PrivateAttr(None)  # the layout, once the data have been read

    @property
    def benchmark(self) -> Benchmark:
        """What LongBench says about the task."""
        return benchmarks()[self._task]

    @property
    def chat(self) -> bool:
        return self.benchmark.chat

    @property
    def stop(self) -> tuple[str, ...]:
        return ("\n",) if self.benchmark.one_line else ()

    @property
    def min_new_tokens(self) -> int:
        return 1 if self.benchmark.one_line else 0

    @property
    def protocol(self) -> str:
        """Whose wording the prompts have; before data are read, that of the usual layout."""
        if self.prompts is not None:
            return "user-prompts"
        usual = self.data is None or self.data.path is None
        joined = usual if self._joined is None else self._joined
        return "official-joined" if joined else "kvtool-wording"

    @property
    def _task(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def _extended(self) -> bool:
        return self.name.startswith("longbench_e/")

    def draw(self, tokens: TokenCounter) -> Iterator[Sample]:
        """Read the samples; `tokens` are not needed."""
        table = self._read()
        self._joined = "answer_prefix" in table.columns
        columns = [*(_JOINED if self._joined else _RAW)]
        columns += ["all_classes"] if self.benchmark.metric == "classification" else []
        table.require(columns + (["length"] if self._extended else []))
        prompt, facts = self._prompt(table)
        for index, row in enumerate(table.rows[: self.samples]):
            yield self._sample(index, row, prompt, facts)

    def _read(self) -> Rows:
        stem = f"{self._task}_e" if self._extended else self._task
        data = self.data or Data(**PRESETS["longbench"])
        if data.hub is not None and data.config is None:
            data = data.model_copy(update={"config": stem})
        table = read_rows(data, ["context", "answers"], task=self.name, stem=stem)
        for row in table.rows:
            if row.get("dataset", stem) not in (self._task, stem):
                raise UsageError(
                    f"{self.name}: `{table.source}` holds `{row['dataset']}`",
                    hint="give a folder with a file for each task",
                )
        return table

    def _prompt(self, table: Rows) -> tuple[str, Json]:
        """Return the template for raw data, and the facts that all samples share."""
        shared = {"data": table.fingerprint, "metric": self.benchmark.metric}
        template = self.benchmark.prompt
        if self.prompts is not None:
            if self._joined:
                raise UsageError(
                    f"{self.name}: `{table.source}` holds whole prompts", hint="leave out `prompts`"
                )
            template, shared["prompts"] = _read_template(self.prompts, self._task, self.name)
        return template, {**shared, "protocol": self.protocol}

    def _sample(self, index: int, row: dict[str, Any], prompt: str, shared: Json) -> Sample:
        where = f"{self.name}: row {index + 1}"
        texts = ("context", "question", "answer_prefix") if self._joined else ("context", "input")
        require(row, (), where, texts)
        context, limit = row["context"], self.benchmark.max_new_tokens
        if self._joined:
            question = row["question"] + row["answer_prefix"]
            limit = row.get("max_new_tokens", limit + _JOINED_SPARE) - _JOINED_SPARE
        else:
            before, question = split_prompt(prompt, row["input"])
            context = before + context
        facts = dict(shared)
        if self.benchmark.metric == "classification":
            facts["all_classes"] = _texts(row, "all_classes", where)
        answers = _texts(row, "answers", where)
        self.score_answer("", answers, facts)  # one that cannot be scored is refused now
        cell = {}
        if self._extended:
            words = row["length"]
            if isinstance(words, bool) or not isinstance(words, (int, float)):
                raise KvtoolError(f"{where}: column `length` must be a number, got `{words}`")
            cell["length_bucket"] = next((b for most, b in _BUCKETS if words < most), "8k+")
        turn = Turn(question, tuple(answers), limit)
        return Sample(str(row.get("_id") or index), context, (turn,), cell, facts)

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return the score against the best reference, from 0 to 100."""
        said = first_line(prediction) if self.benchmark.first_line else prediction
        if self.benchmark.metric == "classification":
            classes = facts["all_classes"]
            return 100 * max(classification(said, wanted, classes) for wanted in references)
        return 100 * best(_METRICS[self.benchmark.metric], said, references)

    def score(self, record: Json) -> dict[str, float]:
        """Return the score, also under the name of LongBench's metric."""
        value = super().score(record)["score"]
        return {"score": value, self.benchmark.metric: value}


def _read_template(path: str, task: str, name: str) -> tuple[str, str]:
    """Return the prompt of a task and the SHA-256 of its file."""
    file = expand(path)
    prompts = read_by(load_json, file, task=f"{name}: prompts")
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        raise UsageError(f"{name}: `{path}` is no JSON object of a prompt for each task")
    if task not in prompts:
        raise UsageError(
            f"{name}: `{path}` has no prompt for `{task}`", hint=did_you_mean(task, prompts)
        )
    return prompts[task], digest(file)


def _texts(row: dict[str, Any], column: str, where: str) -> list[str]:
    """Return a list of texts, which a single one also is; numbers are written out."""
    value = row[column]
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(each, (str, int, float)) for each in values):
        raise KvtoolError(f"{where}: column `{column}` must be a list of texts, got `{value}`")
    return [str(each) for each in values]
