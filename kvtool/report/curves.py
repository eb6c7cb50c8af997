"""Lines: scores against the budget, and whatever curves the tasks recorded.

The full cache is black and dashed everywhere; a missing value is a gap in its line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING

from kvtool.documents.results import ArmEntry, CurveEntry, ResultsDocument, TaskResult
from kvtool.report import numbers
from kvtool.report.arms import Family, budget_size, families, results_of, task_names
from kvtool.report.style import Look, looks, new_figure, variant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL = (3.1, 2.5)  # inches
_ACROSS = 3  # panels in a row
_UNITS = {"tokens": "budget (tokens)", "ratio": "budget (share of the prompt)", "bytes": "budget"}
_AXES = {"length": "context length (tokens)", "prompt": "prompt (tokens)"}
_MOST_SAMPLED = 16  # points beyond which markers are thinned out


@dataclass(frozen=True)
class _Line:
    """A line of one arm."""

    arm: ArmEntry
    family: Family
    x: Sequence[float]
    y: Sequence[float]


def budget_panels(document: ResultsDocument) -> list[tuple[str, str]]:
    """Return the tasks and units of budgets for which scores against budgets can be drawn."""
    units = {budget_size(arm.budget)[0] for arm in document.arms if arm.budget is not None}
    return [
        (task, unit)
        for task in task_names(document)
        for unit in _UNITS
        if unit in units and any(r.value is not None for r in results_of(document, task))
    ]


def budget_figure(document: ResultsDocument) -> Figure:
    """Return a panel per task: a line per policy over its budgets, whiskers one standard error."""
    wanted = budget_panels(document)
    look = looks(document)
    figure, panels = _panels(len(wanted))
    for panel, (task, unit) in zip(panels, wanted, strict=True):
        results = {result.arm: result for result in results_of(document, task)}
        places, ticks = _places(document, unit)
        for family in families(document):
            _budget_line(panel, family, look[family.label], results, places)
        sample = next(iter(results.values()))
        _budget_axis(panel, ticks, document)
        _score_axis(panel, list(results.values()))
        panel.set_title(task)
        panel.set_ylabel(f"{sample.metric} {numbers.direction(sample)}")
    _legend(figure, panels)
    return figure


def _places(document: ResultsDocument, unit: str) -> tuple[dict[str, float], dict[float, str]]:
    """Return where each arm stands on the x axis, and the ticks: budgets, or policies if one."""
    swept = [
        (family, arm)
        for family in families(document)
        for arm in family.arms
        if arm.budget is not None and budget_size(arm.budget)[0] == unit
    ]
    sizes = {arm.name: float(budget_size(arm.budget)[1]) for _, arm in swept}
    if len(set(sizes.values())) > 1:
        return sizes, {sizes[arm.name]: str(arm.budget) for _, arm in swept}
    ranks = {arm.name: float(rank) for rank, (_, arm) in enumerate(swept)}
    return ranks, {ranks[arm.name]: family.label for family, arm in swept}


def _budget_line(
    panel: Axes,
    family: Family,
    look: Look,
    results: dict[str, TaskResult],
    places: dict[str, float],
) -> None:
    for arm in family.arms:
        value = results[arm.name].value if arm.name in results else None
        if arm.budget is None and value is not None:
            dashes = "--" if family.is_full else "-."
            panel.axhline(
                value, color=look.colour, linestyle=dashes, linewidth=1.2, label=family.label
            )
    swept = [arm for arm in family.arms if arm.name in places]
    if not swept:
        return
    found = [results.get(arm.name) for arm in swept]
    panel.errorbar(
        [places[arm.name] for arm in swept],
        [math.nan if r is None or r.value is None else r.value for r in found],
        yerr=[math.nan if r is None or r.stderr is None else r.stderr for r in found],
        color=look.colour,
        marker=look.marker,
        capsize=2.5,
        elinewidth=1.0,
        label=family.label,
    )


def _budget_axis(panel: Axes, ticks: dict[float, str], document: ResultsDocument) -> None:
    budgets = {str(arm.budget): arm.budget for arm in document.arms if arm.budget is not None}
    places = sorted(ticks)
    labels = [ticks[place] for place in places]
    if set(labels) <= set(budgets):
        panel.set_xscale("log", base=2)
        panel.set_xlim(places[0] / 1.3, places[-1] * 1.3)
        panel.set_xlabel(_UNITS[budget_size(labels[0])[0]])
        panel.set_xticks(places, labels)
    else:
        panel.set_xlim(-0.6, len(places) - 0.4)
        panel.set_xlabel(f"budget {', '.join(budgets)}")
        panel.set_xticks(places, [fill(label, 18) for label in labels], rotation=35, ha="right")
    panel.minorticks_off()
    panel.grid(axis="y")


def _score_axis(panel: Axes, results: list[TaskResult]) -> None:
    """Take a log scale where a perplexity explodes, so that the other arms stay apart."""
    values = [result.value for result in results if result.value is not None]
    if results[0].lower_is_better and min(values) > 0 and max(values) / min(values) > 20:
        _log_y(panel)


def curve_names(document: ResultsDocument) -> list[tuple[str, str]]:
    """Return the tasks and their curves, those of cells along one number included."""
    return list(
        dict.fromkeys(
            (task, curve.name)
            for task in task_names(document)
            for result in results_of(document, task)
            for curve in _curves(result)
        )
    )


def curve_figure(document: ResultsDocument, task: str, name: str) -> Figure:
    """Return one curve of a task: a line per policy, a panel per budget.

    With one policy only, its budgets share a panel and have line styles of their own.
    """
    lines, curve = _lines(document, task, name)
    swept = [line for line in lines if line.arm.budget is not None]
    budgets = list(dict.fromkeys(str(line.arm.budget) for line in swept))
    budgets.sort(key=lambda text: budget_size(text))
    together = len({line.family.label for line in swept}) <= 1 or len(budgets) <= 1
    figure, panels = _panels(1 if together else len(budgets), sharey=True)
    look = looks(document)
    for panel, budget in zip(panels, [None] if together else budgets, strict=True):
        for line in lines:
            if budget in (None, str(line.arm.budget)) or line.arm.budget is None:
                rank = budgets.index(str(line.arm.budget)) if line in swept else 0
                own = look[line.family.label]
                if together and len(budgets) > 1:
                    own = variant(own, rank)
                label = line.arm.name if together else line.family.label
                _draw_line(panel, line, own, label)
        _curve_axes(panel, lines, curve)
        panel.set_title(task if budget is None else f"{task}, budget {budget}")
    for panel in panels[::_ACROSS]:
        panel.set_ylabel(curve.y_label)
    _legend(figure, panels)
    return figure


def _curves(result: TaskResult) -> list[CurveEntry]:
    """Return the recorded curves and, for cells along one number, the headline along it."""
    along = [cell for cell in result.cells if len(cell.at) == 1]
    axes = {name for cell in along for name in cell.at}
    if len(along) < 2 or len(along) != len(result.cells) or len(axes) != 1:
        return result.curves
    axis = axes.pop()
    points = {cell.at[axis]: cell.value for cell in along}
    if any(isinstance(x, str) for x in points):
        return result.curves
    y = [math.nan if points[x] is None else points[x] for x in sorted(points)]
    entry = CurveEntry(
        name=axis, x=sorted(points), y=y, x_label=_AXES.get(axis, axis), y_label=result.metric
    )
    return [*result.curves, entry]


def _lines(document: ResultsDocument, task: str, name: str) -> tuple[list[_Line], CurveEntry]:
    lines = []
    found = None
    for family in families(document):
        for arm in family.arms:
            result = document.of(arm.name, task)
            for curve in _curves(result) if result else []:
                if curve.name == name:
                    found = curve
                    lines.append(_Line(arm, family, curve.x, curve.y))
    return lines, found


def _draw_line(panel: Axes, line: _Line, look: Look, label: str) -> None:
    panel.plot(
        line.x,
        line.y,
        color=look.colour,
        marker=look.marker,
        markevery=max(1, len(line.x) // _MOST_SAMPLED),
        linestyle=look.dashes,
        zorder=3 if line.family.is_full else 2,
        label=label,
    )


def _curve_axes(panel: Axes, lines: list[_Line], curve: CurveEntry) -> None:
    x = sorted({value for line in lines for value in line.x})
    y = [value for line in lines for value in line.y if math.isfinite(value)]
    if is_geometric(x):
        panel.set_xscale("log", base=2)
        if len(x) <= 6:
            panel.set_xticks(x, [f"{value:g}" for value in x])
            panel.minorticks_off()
        else:
            panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    elif all(float(value).is_integer() for value in x):
        panel.xaxis.get_major_locator().set_params(integer=True)
    if y and min(y) > 0 and max(y) / min(y) > 100:
        _log_y(panel)
    panel.set_xlabel(curve.x_label)
    panel.grid(axis="y")


def is_geometric(x: Sequence[float]) -> bool:
    """Whether values, ascending, want a log axis: positive, over 8 times, steps that grow.

    >>> is_geometric([1, 2, 4, 8, 16]), is_geometric([0, 1, 2, 3]), is_geometric(range(1, 33))
    (True, False, False)
    """
    steps = [b - a for a, b in zip(x, x[1:], strict=False)]
    return len(steps) > 1 and x[0] > 0 and max(steps) > 1.5 * min(steps) and x[-1] / x[0] >= 4


def _log_y(panel: Axes) -> None:
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.yaxis.set_minor_formatter(lambda value, _: "")


def _panels(count: int, *, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    across = min(count, _ACROSS)
    down = -(-count // across)
    wide = 4.6 if count == 1 else _PANEL[0] * across
    figure = new_figure(wide + 1.5, (3.2 if count == 1 else _PANEL[1] * down) + 0.2)
    grid = figure.subplots(down, across, squeeze=False, sharey=sharey)
    panels = list(grid.flat)
    for panel in panels[count:]:
        panel.set_axis_off()
    return figure, panels[:count]


def _legend(figure: Figure, panels: list[Axes]) -> None:
    """Name each line once, right of the panels, where it covers no data."""
    named = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        named.update({label: handle for label, handle in zip(labels, handles, strict=True)})
    labels = [fill(label, 26) for label in named]
    lines = sum(label.count("\n") + 1 for label in labels)
    figure.set_figheight(max(figure.get_figheight(), 0.18 * lines + 0.3))
    figure.legend(list(named.values()), labels, loc="outside right upper", frameon=False)
