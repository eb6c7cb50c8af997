"""What a reader must know to read the numbers, in plain sentences."""

from __future__ import annotations

from kvtool.documents.results import ResultsDocument
from kvtool.report.metrics import meaning, title
from kvtool.report.spent import spent_by_variant
from kvtool.report.variants import full_variant, results_of, task_names

QUESTIONS = {  # by `TaskResult.question`
    "known": "the question is known while the context is compressed (query-aware)",
    "later": "the context is compressed before the question is known (query-agnostic)",
    "later, kept": "the context is compressed before the question is known, and the question is"
    " kept whole beside it (query-agnostic)",
}


def notes(document: ResultsDocument) -> list[str]:
    """Return one sentence per line, only those that the document needs."""
    if not document.results:
        return ["nothing was measured"]
    lines = [
        "↑ higher is better, ↓ lower is better; ±: standard error" + _delta(document),
        *_metrics(document),
        f"samples: {_samples(document)}",
        *_queries(document),
        *_chunks(document),
    ]
    failed = sum(result.failed for result in document.results)
    if failed:
        lines.append(f"!k: k samples failed and are not in the score ({failed} in all)")
    if not document.complete:
        lines.append("the run is not complete: samples are missing")
    if spent_by_variant(document):
        lines.append(
            "K/V: keys and values at the end of a sample, and their share of a full cache; held:"
            " their buffers and the policy's own numbers, 4.00x = a quarter of the full cache's;"
            " cost is the mean over the samples of all tasks, 1.05x = 1.05 times as fast"
        )
    return lines


def _metrics(document: ResultsDocument) -> list[str]:
    """Say what the headline of each task measures."""
    names = dict.fromkeys(results_of(document, task)[0].metric for task in task_names(document))
    return [f"{name}: {title(name)}, {meaning(name)}" for name in names]


def _delta(document: ResultsDocument) -> str:
    if not full_variant(document):
        return ""
    return (
        "; +/-: difference to the full cache on the same samples [95 % interval], which is within"
        " the noise where that holds 0"
    )


def _samples(document: ResultsDocument) -> str:
    by_task = {}
    for task in task_names(document):
        counts = {result.n for result in document.results if result.task == task}
        low, high = min(counts), max(counts)
        by_task[task] = str(low) if low == high else f"{low}-{high}"
    if len(set(by_task.values())) == 1:
        return next(iter(by_task.values()))
    return ", ".join(f"{task} {count}" for task, count in by_task.items())


def _queries(document: ResultsDocument) -> list[str]:
    lines = []
    for question, words in QUESTIONS.items():
        tasks = [
            task
            for task in task_names(document)
            if any(r.task == task and r.question == question for r in document.results)
        ]
        if tasks:
            every = len(tasks) == len(task_names(document))
            lines.append(words + ("" if every else f": {', '.join(tasks)}"))
    return lines


def _chunks(document: ResultsDocument) -> list[str]:
    """Say where variants were fed a text in unequal chunks, which hold unequal context."""
    lines = []
    for task in task_names(document):
        chunks = {result.chunk for result in document.results if result.task == task}
        if len(chunks - {None}) > 1:
            lines.append(
                f"{task}: policies that cut a prompt were fed blocks, the others one token at a"
                " time; their differences are left blank: compare arms of the same `chunk` only"
            )
    return lines
