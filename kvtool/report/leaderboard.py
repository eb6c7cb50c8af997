"""Write RULER's scores of a run as CSV, in the layout of kvpress' leaderboard.

https://huggingface.co/spaces/nvidia/kvpress-leaderboard: a row for each method and compression
ratio, with the dataset, its length (`data_dir`), the model, RULER's tasks under their own names in
alphabetical order, and their mean as `score`.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Sequence

from kvtool.documents.results import ResultsDocument, TaskResult
from kvtool.errors import UsageError

RULER = (
    "cwe",
    "fwe",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multiquery",
    "niah_multivalue",
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "qa_1",
    "qa_2",
    "vt",
)
_SUITE = "ruler/"


def check_board(tasks: Iterable[str]) -> None:
    """Refuse a run that has nothing of what the board shows.

    Raises:
        UsageError: none of its tasks is one of RULER's.
    """
    names = list(tasks)
    if not any(name.startswith(_SUITE) for name in names):
        raise UsageError(
            "-f board has RULER's scores in its columns, and this run has "
            f"{', '.join(names)} alone",
            hint="-f csv has every score",
        )


def board_csv(document: ResultsDocument) -> str:
    """Return a row for each variant; fields of tasks that a variant has no score of are empty.

    Raises:
        UsageError: none of the tasks is one of RULER's.
    """
    check_board(dict.fromkeys(result.task for result in document.results))
    rows = []
    for variant in document.variants:
        results = [
            result
            for result in document.results
            if result.variant == variant.name and result.task.startswith(_SUITE)
        ]
        rows.append(_row(document.model.id, variant.policy, results))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(model: str, policy: str, results: Sequence[TaskResult]) -> dict[str, object]:
    scores = {result.task.removeprefix(_SUITE): result.value for result in results}
    known = [score for score in scores.values() if score is not None]
    lengths = sorted(
        {length for result in results for length in result.settings.get("lengths", ())}
    )
    return {
        "dataset": "ruler",
        "data_dir": "+".join(map(str, lengths)),
        "model": model,
        "method": policy,
        "compression_ratio": _removed(results),
        "query_aware": all(result.query_aware for result in results),
        "question": " / ".join(dict.fromkeys(result.question for result in results)),
        **{name: _rounded(scores.get(name)) for name in RULER},
        "score": _rounded(statistics.fmean(known) if known else None),
        "tasks": len(known),
    }


def _removed(results: Sequence[TaskResult]) -> float | None:
    """Return the share of their bytes that keys and values lack at a sample's end, over all tasks.

    Codecs make fewer bytes of what stays, too.
    """
    costs = [result.cost for result in results if result.cost is not None]
    shares = [1 - cost.kv_bytes / cost.full_bytes for cost in costs if cost.full_bytes]
    return round(statistics.fmean(shares), 4) if shares else None


def _rounded(score: float | None) -> float | None:
    return None if score is None else round(score, 2)
