"""Needle-in-a-haystack results as a grid: depths down, lengths across."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from kvtool.documents.results import ResultsDocument, TaskResult
from kvtool.report.variants import results_of, task_names


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

    def over_depths(self) -> NeedleGrid:
        """Return the means over the depths of each length, as a grid of one row."""
        columns = [
            [x for x in column if x is not None] for column in zip(*self.values, strict=True)
        ]
        means = tuple(statistics.fmean(known) if known else None for known in columns)
        return NeedleGrid(self.lengths, (), (means,))


def needle_tasks(document: ResultsDocument) -> list[str]:
    """Return the tasks whose cells are a length and a depth."""
    return [task for task in task_names(document) if needle_grids(document, task)]


def needle_grids(document: ResultsDocument, task: str) -> dict[str, NeedleGrid]:
    """Return each variant's grid on one task; all have the same lengths and depths."""
    by_variant = {result.variant: _scores(result) for result in results_of(document, task)}
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
    """Return whether cells are places of a needle: a length and a depth, both of them numbers."""
    return bool(result.cells) and all(_is_place(cell.at) for cell in result.cells)


def _is_place(at: Mapping[str, object]) -> bool:
    numbers = (isinstance(value, (int, float)) for value in at.values())
    return set(at) == {"length", "depth"} and all(numbers)


def scale(result: TaskResult) -> float:
    """Return the score at the light end, the same for every variant of a task."""
    return result.best or 1.0


def _scores(result: TaskResult) -> dict[tuple[int, float], float | None]:
    return {
        (int(cell.at["length"]), float(cell.at["depth"])): cell.value
        for cell in (result.cells if is_needle(result) else [])
    }
