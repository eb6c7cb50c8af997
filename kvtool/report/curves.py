"""Whatever curves the tasks recorded, and headlines along one number such as the length.

The full cache is black and dotted everywhere; a missing value is a gap in its line. Likelihoods are
drawn as the difference to the full cache's, from the budget on: before it, nothing is evicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from kvtool.documents.results import CurveEntry, ResultsDocument, TaskResult, VariantEntry
from kvtool.report import formats
from kvtool.report.metrics import headline
from kvtool.report.needles import is_needle
from kvtool.report.panels import (
    ACROSS,
    Look,
    add_legend,
    covered,
    dashed,
    face,
    log_tokens,
    log_y,
    looks,
    name_hollow,
    new_panels,
    whole_ticks,
    widen_covered,
)
from kvtool.report.variants import (
    Family,
    families,
    fed_like_full,
    full_variant,
    results_of,
    task_names,
)
from kvtool.sizes import budget_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXES = {"length": "context length (tokens)"}
_LIKELIHOOD = "nll by position"
_MOST_TICKS = 6
_MOST_SAMPLED = 16  # points beyond which markers are thinned out


@dataclass(frozen=True)
class _Line:
    """A line of one variant; hollow if it was not fed like the full cache."""

    variant: VariantEntry
    family: Family
    x: Sequence[float]
    y: Sequence[float]
    hollow: bool

    @property
    def first_evicting(self) -> float:
        """The position from which a budget in tokens can change results, else 0."""
        budget = self.variant.budget
        unit, size = ("", 0) if budget is None else budget_size(budget)
        return float(size) if unit == "tokens" else 0.0


def curves(document: ResultsDocument) -> list[tuple[str, CurveEntry]]:
    """Return each task's curves, as the first variant has them, cells along one number included."""
    found = {
        (task, curve.name): curve
        for task in task_names(document)
        for result in reversed(results_of(document, task))
        for curve in _curves(result)
    }
    return [(task, curve) for (task, _), curve in found.items()]


def y_label(document: ResultsDocument, task: str, curve: CurveEntry) -> str:
    """Return the title of the y axis of a curve: its label, or the difference to full's."""
    less = ", less full's" if _is_less_full(document, task, curve) else ""
    return f"{curve.y_label}{less}"


def _is_less_full(document: ResultsDocument, task: str, curve: CurveEntry) -> bool:
    """Return whether a curve is drawn as the difference to that of the full cache."""
    full = full_variant(document)
    result = None if full is None else document.of(full.name, task)
    names = [] if result is None else [each.name for each in result.curves]
    return curve.name == _LIKELIHOOD and curve.name in names


def curve_figure(document: ResultsDocument, task: str, name: str) -> Figure:
    """Return one curve of a task: a line per policy, a panel per budget.

    With one policy only, its budgets share a panel and have line styles of their own.
    """
    lines, curve = _lines(document, task, name)
    left_out: list[str] = []
    if _is_less_full(document, task, curve):
        left_out = list(dict.fromkeys(line.family.label for line in lines if line.hollow))
        lines = _less_full([line for line in lines if not line.hollow])
    limited = [line for line in lines if line.variant.budget is not None]
    budgets = sorted({str(line.variant.budget) for line in limited}, key=budget_size)
    alone = len({line.family.label for line in limited}) <= 1
    together = alone or len(budgets) <= 1
    look, wanted = looks(document), [None] if together else budgets
    figure, panels = new_panels(len(wanted), sharey=True)
    for panel, budget in zip(panels, wanted, strict=True):
        shown = [
            line
            for line in lines
            if budget is None or line.variant.budget is None or str(line.variant.budget) == budget
        ]
        values = [dict(zip(line.x, line.y, strict=True)) for line in shown]
        colours = None if alone else [look[line.family.label].colour for line in shown]
        for line, by_x, hidden in zip(shown, values, covered(values, colours), strict=True):
            own = look[line.family.label]
            if together and line.variant.budget is not None and len(budgets) > 1:
                own = dashed(own, budgets.index(str(line.variant.budget)))
            if not line.family.is_full:  # which is drawn over the others
                widen_covered(panel, {x: (x, y) for x, y in by_x.items()}, hidden, own.colour)
            _draw_line(panel, line, own, line.variant.name if together else line.family.long_label)
        _curve_axes(panel, shown, curve)
        if left_out:
            panel.plot([], [], " ", label=f"not drawn: {', '.join(left_out)} (fed in blocks)")
        panel.set_title(task if budget is None else f"{task}, budget {budget}")
    for panel in panels[::ACROSS]:
        panel.set_ylabel(y_label(document, task, curve))
    add_legend(figure, panels)
    return figure


def _curves(result: TaskResult) -> list[CurveEntry]:
    """Return the recorded curves and, where cells differ in one number, the headline along it."""
    names = {name for cell in result.cells for name in cell.at}
    varied = [name for name in names if len({cell.at.get(name) for cell in result.cells}) > 1]
    if len(varied) != 1 or is_needle(result):
        return result.curves
    axis = varied[0]
    points: dict[float, float] = {}
    for cell in result.cells:
        x = cell.at.get(axis)
        if not isinstance(x, (int, float)):
            return result.curves
        points[x] = math.nan if cell.value is None else cell.value
    entry = CurveEntry(
        name=f"score by {axis}",
        x=sorted(points),
        y=[points[x] for x in sorted(points)],
        x_label=_AXES.get(axis, axis.replace("_", " ")),
        y_label=headline(result),
    )
    return [*result.curves, entry]


def _lines(document: ResultsDocument, task: str, name: str) -> tuple[list[_Line], CurveEntry]:
    """Return the line of every variant that has a curve, and the curve of the last one."""
    lines = []
    for family in families(document):
        for variant in family.variants:
            result = document.of(variant.name, task)
            for curve in _curves(result) if result else []:
                if result is not None and curve.name == name:
                    last, hollow = curve, not fed_like_full(document, result)
                    lines.append(_Line(variant, family, curve.x, curve.y, hollow))
    return lines, last


def _less_full(lines: list[_Line]) -> list[_Line]:
    """Return lines less the full cache's, from the budget on."""
    full = next(line for line in lines if line.family.is_full)
    theirs = dict(zip(full.x, full.y, strict=True))
    first = min((line.first_evicting for line in lines if line is not full), default=0.0)
    drawn = []
    for line in lines:
        start = first if line is full else line.first_evicting
        points = zip(line.x, line.y, strict=True)
        less = {x: y - theirs[x] for x, y in points if x in theirs and x >= start}
        drawn.append(replace(line, x=list(less), y=list(less.values())))
    return drawn


def _draw_line(panel: Axes, line: _Line, look: Look, label: str) -> None:
    panel.plot(
        line.x,
        line.y,
        color=look.colour,
        marker=look.marker,
        markerfacecolor=face(look, line.hollow),
        markevery=max(1, len(line.x) // _MOST_SAMPLED),
        linestyle=look.dashes,
        zorder=3 if line.family.is_full else 2,
        label=label,
    )
    if line.hollow:
        name_hollow(panel)


def _curve_axes(panel: Axes, lines: list[_Line], curve: CurveEntry) -> None:
    x = sorted({value for line in lines for value in line.x})
    y = [value for line in lines for value in line.y if math.isfinite(value)]
    if is_geometric(x):
        log_tokens(panel)
    if len(x) <= _MOST_TICKS:
        panel.set_xticks(x, [formats.tokens(value) for value in x])
    elif not is_geometric(x) and all(float(value).is_integer() for value in x):
        whole_ticks(panel.xaxis)
    if y and min(y) > 0 and max(y) / min(y) > 100:
        log_y(panel)
    panel.set_xlabel(curve.x_label)
    panel.grid(axis="y")


def is_geometric(x: Sequence[float]) -> bool:
    """Return whether ascending values want a log axis: positive, a wide range, steps that grow.

    >>> is_geometric([1, 2, 4, 8, 16]), is_geometric([0, 1, 2, 3]), is_geometric(range(1, 33))
    (True, False, False)
    """
    steps = [b - a for a, b in pairwise(x)]
    return len(steps) > 1 and x[0] > 0 and max(steps) > 1.5 * min(steps) and x[-1] / x[0] >= 4
