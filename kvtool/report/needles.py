"""Needle-in-a-haystack results as heat maps: depths down, lengths across."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING

from kvtool.documents.results import ResultsDocument, TaskResult, VariantEntry
from kvtool.report import formats
from kvtool.report.colour_scale import CIVIDIS, INK, ink_on
from kvtool.report.costs import spent_by_variant
from kvtool.report.metrics import title as title_of
from kvtool.report.panels import new_figure, whole_ticks
from kvtool.report.variants import FULL, Family, families, results_of, task_names, wrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


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
    thin = _is_thin(rows)
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
    panels, images = [], []
    for i, row in enumerate(rows):
        for j, variant in enumerate(row):
            panel = figure.add_subplot(places[i, j])
            panels.append(panel)
            grid, result = grids[variant.name], results[variant.name]
            images.append(_draw(panel, grid, scale(result), document.model.trained_length))
            panel.tick_params(labelleft=j == 0)
            mean = formats.score(result.value, result.best)
            panel.set_title(f"{names[variant.name]}\nmean {mean}", fontsize=8.5)
    shrink = min(1.0, 3.2 / tall)
    bar = figure.colorbar(images[-1], ax=panels, shrink=shrink, aspect=18, anchor=(0.0, 1.0))
    bar.set_label(title_of(results[next(iter(grids))].metric))
    bar.outline.set_visible(False)
    words = "context length (tokens)" + _trained(document, sample)
    figure.supxlabel(fill(words, int(figure.get_figwidth() * 12)), fontsize=9)
    figure.supylabel("needle depth (%)", fontsize=9)
    return figure


def _is_thin(rows: list[list[VariantEntry]]) -> bool:
    """Return whether the first row is the full cache, with others below it."""
    return len(rows) > 1 and [variant.policy for variant in rows[0]] == [FULL]


def _beyond(grid: NeedleGrid, trained: int | None) -> int | None:
    """Return the first column that the model was not trained for, None if all or no column is."""
    first = sum(length <= trained for length in grid.lengths) if trained else 0
    return first if 0 < first < len(grid.lengths) else None


def _trained(document: ResultsDocument, grid: NeedleGrid) -> str:
    trained = document.model.trained_length
    told = _beyond(grid, trained) is not None
    return f"; right of the dashed line: longer than trained for ({trained})" if told else ""


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


def _draw(panel: Axes, grid: NeedleGrid, best: float, trained: int | None) -> AxesImage:
    import numpy as np
    from matplotlib import colormaps

    colours = colormaps[CIVIDIS].with_extremes(bad="#e6e6e6")
    values = np.array(grid.values, dtype=float)
    image = panel.imshow(values, cmap=colours, vmin=0.0, vmax=best, aspect="auto")
    _label(panel, grid)
    if max(values.shape) <= _NUMBERED:
        _number(panel, grid, best)
    if (beyond := _beyond(grid, trained)) is not None:
        panel.axvline(beyond - 0.5, color="black", linestyle="--", linewidth=1.2)
    panel.spines[:].set_visible(False)
    panel.tick_params(length=0)
    return image


def _label(panel: Axes, grid: NeedleGrid) -> None:
    columns, rows = len(grid.lengths), len(grid.depths)
    across = range(0, columns, -(-columns // 12))
    down = range(0, rows, -(-rows // 6) if rows > 7 else 1)
    depths = [f"{grid.depths[i]:g}" for i in down]
    turned = 0 if max(len(formats.tokens(length)) for length in grid.lengths) <= 4 else 45
    panel.set_xticks(
        list(across), [formats.tokens(grid.lengths[i]) for i in across], rotation=turned, fontsize=7
    )
    panel.set_yticks(list(down) or [0], depths or ["all"], fontsize=7)


def _number(panel: Axes, grid: NeedleGrid, best: float) -> None:
    for row, values in enumerate(grid.values):
        for column, value in enumerate(values):
            ink = INK["black" if value is None else ink_on(value / best)]
            text = _cell(value, best)
            panel.text(column, row, text, ha="center", va="center", fontsize=6, color=ink)


def _cell(value: float | None, best: float) -> str:
    """Write a score in as few characters as it takes: `.25`, `1`, `0`; `66` out of 100."""
    if value is None:
        return formats.MISSING
    if best > 1:
        return f"{value:.0f}"
    return f"{value:.2f}".removeprefix("0").replace(".00", "") or "0"


_LAYER_CELL = (0.34, 0.2)  # inches
_MOST_LAYERS = 20  # the most layers whose numbers are still legible
_LETTER = 0.07  # inches
_LABEL_ROWS = 4  # from which on the label of the colours fits upright beside them


def kept_by_layer(document: ResultsDocument) -> dict[str, tuple[float, ...]]:
    """Return the mean tokens of each layer by variant, of those that recorded them.

    Names say of variants whose budget is read that the tokens are those stored.
    """
    spent = spent_by_variant(document)
    return {
        f"{variant.name} (stored)" if variant.reads else variant.name: spent[variant.name].kept
        for family in families(document)
        for variant in family.variants
        if variant.name in spent and spent[variant.name].kept
    }


def layers_figure(document: ResultsDocument) -> Figure:
    """Return a row of numbers for each variant: what its layers kept, the mean of all samples."""
    kept = kept_by_layer(document)
    names, count = list(kept), len(next(iter(kept.values())))
    left = _LETTER * max(map(len, names))
    width = max(2.0, _LAYER_CELL[0] * min(count, _MOST_LAYERS))
    few = len(names) < _LABEL_ROWS
    figure = new_figure(left + width + (1.7 if few else 1.2), _LAYER_CELL[1] * len(names) + 0.9)
    panel = figure.subplots()
    most = max(max(row) for row in kept.values()) or 1.0
    image = panel.imshow(list(kept.values()), cmap=CIVIDIS, vmin=0.0, vmax=most, aspect="auto")
    panel.set_yticks(range(len(names)), names)
    if count <= _MOST_LAYERS:
        panel.set_xticks(range(count))
        _number_layers(panel, list(kept.values()), most)
    else:
        whole_ticks(panel.xaxis)
    panel.set_xlabel("layer (0 tokens: without attention)" if _has_none(kept) else "layer")
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=panel, aspect=18, shrink=min(1.0, 14 / len(names)))
    if few:
        bar.set_label("tokens per\nKV head", rotation=0, ha="left", va="center")
    else:
        bar.set_label("tokens per KV head")
    bar.outline.set_visible(False)
    return figure


def _has_none(kept: dict[str, tuple[float, ...]]) -> bool:
    return any(0 in row for row in kept.values())


def _number_layers(panel: Axes, rows: list[tuple[float, ...]], most: float) -> None:
    for y, row in enumerate(rows):
        for x, tokens in enumerate(row):
            ink = INK[ink_on(tokens / most)]
            panel.text(x, y, f"{tokens:.0f}", ha="center", va="center", fontsize=6.5, color=ink)
