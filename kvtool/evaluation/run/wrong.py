"""Answers of a run that are not the references, for people to look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvtool.documents.results import ResultsDocument
from kvtool.documents.settings import Protocol
from kvtool.evaluation.metrics.text import contains
from kvtool.evaluation.run.index import of_this_run, read_samples, read_task, read_variant
from kvtool.evaluation.run.runner import Place
from kvtool.evaluation.run.store import Store
from kvtool.evaluation.samples.sample import Json
from kvtool.evaluation.tasks.task import Task


@dataclass(frozen=True)
class WrongAnswer:
    """An answer with a score below the best one.

    Attributes:
        sample: its id.
        question: which of the questions about one text, from 1; None where there is one only.
        references: the right answers.
        score: the headline of the whole sample, out of `best`.
    """

    variant: str
    sample: str
    question: int | None
    answer: str
    references: tuple[str, ...]
    score: float
    best: float


def wrong_answers(
    folder: Path, results: ResultsDocument, most: int = 3
) -> dict[str, list[WrongAnswer]]:
    """Return at most `most` wrong answers of each task; none where it asks nothing.

    They are of the variants that score best, in the middle and worst among those that err. So both
    a near miss and a breakdown are seen. Further ones are of the same variants.

    Args:
        folder: of the run; its files of samples are read.

    Raises:
        KvtoolError: files that are damaged.
        UsageError: a variant whose policy is from a module that is not imported.
    """
    store = Store(folder)
    index = read_samples(store)
    place = Place(index.model, Protocol(**index.protocol.model_dump()))
    variants = {entry.name: read_variant(entry, index.plan) for entry in index.variants}
    found = {}
    for entry in index.tasks:
        task = read_task(entry, store)
        by_variant = []
        for name in _chosen(results, task, most):
            configuration = place.configuration(variants[name], task)
            records = store.records(variants[name].folder, entry.task)
            wrong = _wrong_among(of_this_run(records, configuration, entry)[0], name, task)
            by_variant.append(list(islice(wrong, most)))
        found[entry.task] = _in_turn(by_variant, most)
    return found


def _chosen(results: ResultsDocument, task: Task, most: int) -> list[str]:
    """Return the variants that score best, in the middle and worst among those that err."""
    best = task.best
    if best is None or task.lower_is_better:
        return []
    scored = [(r.value, r.variant) for r in results.results if r.task == task.name]
    erring = [(value, variant) for value, variant in scored if value is not None and value < best]
    variants = [variant for _, variant in sorted(erring, key=lambda pair: -pair[0])]
    step = (len(variants) - 1) / max(1, most - 1)
    return [variants[i] for i in dict.fromkeys(round(i * step) for i in range(most)) if variants]


def _wrong_among(
    records: list[tuple[str, Json]], variant: str, task: Task
) -> Iterator[WrongAnswer]:
    for sample, record in records:
        turns = record.get("turns") or [record]
        score = task.score(record).get(task.metric) if "prediction" in turns[0] else None
        if score is None or task.best is None or score >= task.best:
            continue
        place, turn = _first_miss(turns)
        yield WrongAnswer(
            variant=variant,
            sample=sample,
            question=place + 1 if len(turns) > 1 else None,
            answer=turn["prediction"],
            references=tuple(turn["references"]),
            score=score,
            best=task.best,
        )


def _first_miss(turns: list[Json]) -> tuple[int, Json]:
    """Return the first turn whose answer holds none of its references, else the first one."""
    for place, turn in enumerate(turns):
        if not any(contains(turn["prediction"], reference) for reference in turn["references"]):
            return place, turn
    return 0, turns[0]


def _in_turn(by_variant: list[list[WrongAnswer]], most: int) -> list[WrongAnswer]:
    """Take one of each variant, then another of each, up to `most`; return them by variant."""
    taken = [0] * len(by_variant)
    for place in range(most):
        for rank, answers in enumerate(by_variant):
            if place < len(answers) and sum(taken) < most:
                taken[rank] += 1
    return [
        answer
        for count, answers in zip(taken, by_variant, strict=True)
        for answer in answers[:count]
    ]
