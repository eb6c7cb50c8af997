"""Write the results of a run for the repository: what its pages are derived from, and no more.

    python recipes/thin.py runs/claims/order recipes/claims/results/order.json

The first is the folder of a run, or a file of results. Left out is what can be derived from the
scores of the samples (differences, verdicts, scores by cell, curves) and what no page reads. A
folder's records have the likelihood of right answers, too (`answers: scored`): but for perplexity,
it is kept by sample as a task of its own, `niah (nll)`, so that policies can be compared by it. A
result is a line.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from kvtool.documents.results import ResultsDocument, TaskResult
from kvtool.documents.verdict import SampleScores
from kvtool.evaluation.run.index import RESULTS, read_results_file
from kvtool.evaluation.run.store import Store

NLL = " (nll)"
"""Behind the name of a task: its right answers' negative log-likelihood, in nats a token."""


def thin(document: ResultsDocument) -> ResultsDocument:
    """Return the results without what is derived from them."""
    results = [
        result.model_copy(update={"cells": [], "curves": [], "cost": _cost(result)})
        for result in document.results
    ]
    derived = {"samples": {}, "differences": [], "verdict": None, "claim_verdict": None}
    return document.model_copy(update={"results": results} | derived)


def _cost(result: TaskResult) -> object:
    """Return the costs, without those of each layer."""
    return result.cost and result.cost.model_copy(update={"kept_per_layer": []})


def likelihoods(document: ResultsDocument, folder: Path) -> Iterator[TaskResult]:
    """Yield a result for each that has the log-likelihood of right answers, from its records."""
    store = Store(folder)
    places = {variant.name: variant.folder for variant in document.variants}
    for result in document.results:
        [mean] = [each for each in result.metrics if each.name == "nll"] or [None]
        if mean is None or result.metric == "ppl":  # e to its power
            continue
        records = store.records(places[result.variant], result.task)
        found = {record["id"]: record["scores"]["nll"] for record in records.values()}
        sums = [found.get(name) for name in document.samples[result.task]]
        yield result.model_copy(
            update={
                "task": result.task + NLL,
                "metric": mean.name,
                "value": mean.value,
                "stderr": mean.stderr,
                "delta": None,
                "best": None,
                "lower_is_better": True,
                "droppable": False,
                "metrics": [mean],
                "paired": None,
                "scores": SampleScores(sums=sums, link="mean"),
            }
        )


def written(document: ResultsDocument) -> str:
    """Return a document as JSON with a line for each of its parts, and for each result."""
    parts = json.loads(document.to_json())
    lines = [
        f"{json.dumps(key)}: "
        + (f"[\n{_lines(part)}\n]" if key == "results" else json.dumps(part, ensure_ascii=False))
        for key, part in parts.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(entries: list[object]) -> str:
    return ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)


def main() -> None:
    """Write one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of a run, or a file of results")
    parser.add_argument("file", type=Path, help="what to write")
    options = parser.parse_args()
    folder = options.run.is_dir()
    document = read_results_file(options.run / RESULTS if folder else options.run)
    if folder:
        more = list(likelihoods(document, options.run))
        document = document.model_copy(update={"results": [*document.results, *more]})
    options.file.write_text(written(thin(document)), encoding="utf-8")


if __name__ == "__main__":
    main()
