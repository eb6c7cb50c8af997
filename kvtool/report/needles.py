"""Needle-in-a-haystack results as heat maps: depths down, lengths across."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from textwrap import fill
from typing import TYPE_CHECKING

from kvtool.documents.results import ResultsDocument, TaskResult, VariantEntry
from kvtool.report import formats
from kvtool.report.metrics import title as title_of
from kvtool.report.panels import colour_bar, heat_map, new_figure
from kvtool.report.variants import FULL, Family, families, results_of, task_names, wrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    by_variant = {
        result.variant: {
            (int(cell.at["length"]), float(cell.at["depth"])): cell.value for cell in result.cells
        }
        for result in results_of(document, task)
        if is_needle(result)
    }
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
    }


def is_needle(result: TaskResult) -> bool:
    """Return whether cells are places of a needle: a length and a depth, both of them numbers."""
    return bool(result.cells) and all(
        cell.at.keys() == {"length", "depth"}
        and all(isinstance(value, (int, float)) for value in cell.at.values())
        for cell in result.cells
    )


def scale(result: TaskResult) -> float:
    """Return the score at the light end, the same for every variant of a task."""
    return result.best or 1.0


_NUMBERED = 20  # the most rows and columns whose numbers are still legible
_CELL = (0.31, 0.17)  # inches
_WIDE = 4  # panels in a row where there is no grid of policies and budgets


def needle_figure(document: ResultsDocument, task: str) -> Figure:
    """Return a panel for every variant in a common scale: rows are policies, columns budgets.

    The full cache, with which others are compared, is a thin row above them: its means over depths.
    """
    grids = needle_grids(document, task)
    results = {result.variant: result for result in results_of(document, task)}
    rows = _layout(families(document), set(grids))
    thin = len(rows) > 1 and [variant.policy for variant in rows[0]] == [FULL]
    if thin:
        grids[rows[0][0].name] = grids[rows[0][0].name].over_depths()
    columns = max(len(row) for row in rows)
    sample = next(iter(grids.values()))
    depths = max(len(grid.depths) for grid in grids.values())
    width = max(1.9, _CELL[0] * min(len(sample.lengths), _NUMBERED) + 0.3)
    names = {variant.name: wrap(variant.name, int(width * 11)) for row in rows for variant in row}
    title = 0.15 * (2 + max(name.count("\n") for name in names.values()))
    height = max(1.0, _CELL[1] * min(depths, _NUMBERED))
    heights = [_CELL[1] * 1.3 if thin and row is rows[0] else height for row in rows]
    tall = sum(heights) + (title + 0.15) * len(rows)
    figure = new_figure(width * columns + 1.3, tall + 0.5)
    places = figure.add_gridspec(len(rows), columns, height_ratios=heights)
    trained = document.model.trained_length
    beyond = sum(length <= trained for length in sample.lengths) if trained else 0
    beyond %= len(sample.lengths)  # 0 if the model was trained for all or for none
    panels = []
    for i, row in enumerate(rows):
        for j, variant in enumerate(row):
            panel = figure.add_subplot(places[i, j])
            panels.append(panel)
            grid, result = grids[variant.name], results[variant.name]
            best, few = scale(result), max(len(grid.lengths), len(grid.values)) <= _NUMBERED
            says = partial(_cell, best=best) if few else None
            image = heat_map(panel, grid.values, most=best, says=says)
            _label(panel, grid)
            if beyond:
                panel.axvline(beyond - 0.5, color="black", linestyle="--", linewidth=1.2)
            panel.tick_params(labelleft=j == 0)
            mean = formats.score(result.value, result.best)
            panel.set_title(f"{names[variant.name]}\nmean {mean}", fontsize=8.5)
    bar = colour_bar(image, panels, shrink=min(1.0, 3.2 / tall), anchor=(0.0, 1.0))
    bar.set_label(title_of(results[next(iter(grids))].metric))
    line = f"; right of the dashed line: longer than trained for ({trained})" if beyond else ""
    words = fill(f"context length (tokens){line}", int(figure.get_figwidth() * 12))
    figure.supxlabel(words, fontsize=9)
    figure.supylabel("needle depth (%)", fontsize=9)
    return figure


def _layout(found: list[Family], measured: set[str]) -> list[list[VariantEntry]]:
    """Return rows of variants: the full cache, then a policy each if several have several budgets.

    Otherwise the policies fill rows.
    """
    rows = [
        [variant for variant in family.variants if variant.name in measured] for family in found
    ]
    rows = [row for row in rows if row]
    if sum(len(row) > 1 for row in rows) > 1:
        return rows
    flat = [variant for row in rows for variant in row]
    first = [variant for variant in flat if variant.policy == FULL]
    others = flat[len(first) :]
    filled = [others[start : start + _WIDE] for start in range(0, len(others), _WIDE)]
    return [first, *filled] if first else filled


def _label(panel: Axes, grid: NeedleGrid) -> None:
    columns, rows = len(grid.lengths), len(grid.depths)
    across = range(0, columns, -(-columns // 12))
    down = range(0, rows, -(-rows // 6) if rows > 7 else 1)
    lengths = [formats.tokens(grid.lengths[i]) for i in across]
    turned = 0 if max(map(len, lengths)) <= 4 else 45
    panel.set_xticks(list(across), lengths, rotation=turned, fontsize=7)
    depths = [f"{grid.depths[i]:g}" for i in down]
    panel.set_yticks(list(down) or [0], depths or ["all"], fontsize=7)


def _cell(value: float | None, best: float) -> str:
    """Write a score in as few characters as it takes: `.25`, `1`, `0`; `66` out of 100."""
    if value is None:
        return formats.MISSING
    if best > 1:
        return f"{value:.0f}"
    return f"{value:.2f}".removeprefix("0").replace(".00", "") or "0"
