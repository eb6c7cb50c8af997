"""Needle-in-a-haystack results as a grid: depths down, lengths across, red to green.

The colours are those of Kamradt's plots, which the field has kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.documents.results import ResultsDocument, TaskResult
from kvtool.report.variants import results_of, task_names

RED, YELLOW, GREEN = COLOURS = ("#F0496E", "#EBB839", "#0CD79F")


@dataclass(frozen=True)
class NeedleGrid:
    """The scores of one variant.

    Attributes:
        lengths: context lengths in tokens, ascending.
        depths: where the needle lies, in percent, ascending.
        values: one row per depth, one entry per length; None where nothing was measured.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    values: tuple[tuple[float | None, ...], ...]


def needle_tasks(document: ResultsDocument) -> list[str]:
    """Return the tasks whose cells are a length and a depth."""
    return [task for task in task_names(document) if needle_grids(document, task)]


def needle_grids(document: ResultsDocument, task: str) -> dict[str, NeedleGrid]:
    """Return each variant's grid on one task; all have the same lengths and depths."""
    by_variant = {result.arm: _scores(result) for result in results_of(document, task)}
    places = {place for scores in by_variant.values() for place in scores}
    lengths = tuple(sorted({length for length, _ in places}))
    depths = tuple(sorted({depth for _, depth in places}))
    return {
        variant: NeedleGrid(
            lengths,
            depths,
            tuple(tuple(scores.get((length, depth)) for length in lengths) for depth in depths),
        )
        for variant, scores in by_variant.items()
        if scores
    }


def is_needle(result: TaskResult) -> bool:
    """Tell whether cells are places of a needle: lengths and depths."""
    return bool(result.cells) and all(set(cell.at) == {"length", "depth"} for cell in result.cells)


def scale(result: TaskResult) -> float:
    """Return the score at the green end, the same for every variant of a task."""
    return result.best or 1.0


def colour_at(share: float) -> tuple[int, int, int]:
    """Mix the colours for a share of a perfect score.

    >>> colour_at(0.0), colour_at(1.0)
    ((240, 73, 110), (12, 215, 159))
    """
    share = min(max(share, 0.0), 1.0) * 2
    low, high = (RED, YELLOW) if share <= 1 else (YELLOW, GREEN)
    part = share if share <= 1 else share - 1
    mixed = [round(a + (b - a) * part) for a, b in zip(_rgb(low), _rgb(high), strict=True)]
    return mixed[0], mixed[1], mixed[2]


def _scores(result: TaskResult) -> dict[tuple[int, float], float | None]:
    return {
        (int(cell.at["length"]), float(cell.at["depth"])): cell.value
        for cell in (result.cells if is_needle(result) else [])
    }


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
