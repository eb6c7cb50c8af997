"""Panels of lines: how many in a row, points with whiskers, a legend that covers no data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvtool.documents.results import TaskResult
from kvtool.report.style import Look, new_figure
from kvtool.report.variants import wrap

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

ACROSS = 2  # panels in a row
_HOLLOW = "hollow: fed in blocks, does not compare"
_LINE, _BESIDE = 1.6, 2.4  # points: of a line, and of what shows of one that is covered
_PANEL = (3.1, 2.6)  # inches


def new_panels(count: int, *, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels, row by row."""
    across = min(count, ACROSS)
    down = -(-count // across)
    wide = 4.6 if count == 1 else _PANEL[0] * across
    figure = new_figure(wide + 1.5, (3.2 if count == 1 else _PANEL[1] * down) + 0.2)
    grid = figure.subplots(down, across, squeeze=False, sharey=sharey)
    panels = list(grid.flat)
    for panel in panels[count:]:
        panel.set_axis_off()
    return figure, panels[:count]


def add_legend(figure: Figure, panels: list[Axes]) -> None:
    """Name each line once, right of the panels, where it covers no data."""
    named: dict[str, Artist] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        for handle, label in zip(handles, map(str, labels), strict=True):
            named.setdefault(label, handle)
    wrapped = [wrap(label, 26) for label in named]
    lines = sum(label.count("\n") + 1 for label in wrapped)
    figure.set_figheight(max(figure.get_figheight(), 0.18 * lines + 0.3))
    figure.legend(
        handles=list(named.values()), labels=wrapped, loc="outside right upper", frameon=False
    )


def draw_points(
    panel: Axes,
    x: Sequence[float],
    y: Sequence[float | None],
    spans: Sequence[tuple[float, float] | None],
    look: Look,
    label: str,
    *,
    hollow: bool = False,
) -> None:
    """Draw a policy's scores with whiskers; None is a gap.

    Args:
        spans: the ends of each whisker, from which scores may lie a little outside.
        hollow: whether markers are empty, as of scores that do not compare with the others.
    """
    known = [math.nan if value is None else value for value in y]
    reach = [
        (math.nan, math.nan)
        if span is None
        else (max(0.0, value - span[0]), max(0.0, span[1] - value))
        for value, span in zip(known, spans, strict=True)
    ]
    panel.errorbar(
        x,
        known,
        yerr=list(zip(*reach, strict=True)) or None,
        color=look.colour,
        marker=look.marker,
        markerfacecolor=face(look, hollow),
        linestyle=look.dashes,
        capsize=2.5,
        elinewidth=1.0,
        label=label,
    )
    if hollow:
        name_hollow(panel)


def whisker(result: TaskResult) -> tuple[float, float] | None:
    """Return the 95 % interval of the difference to the full cache, set upon its score.

    A whisker that holds the full cache's score is within the noise. Without a pair it is two
    standard errors; None where there are neither.
    """
    pair = result.paired
    if pair is not None:
        if pair.low is None or pair.high is None:
            return None
        return pair.full + pair.low, pair.full + pair.high
    if result.value is None or result.stderr is None:
        return None
    return result.value - 1.96 * result.stderr, result.value + 1.96 * result.stderr


def face(look: Look, hollow: bool) -> str:
    """Return what markers are filled with."""
    return "white" if hollow else look.colour


def name_hollow(panel: Axes) -> None:
    """Say in the legend what hollow markers are."""
    panel.plot([], [], "o", color="#777777", markerfacecolor="white", label=_HOLLOW)


def widen_covered(
    panel: Axes,
    line: Mapping[float, tuple[float, float]],
    pieces: Mapping[tuple[float, float], int],
    colour: str,
) -> None:
    """Draw the pieces of a line that others will be drawn over so wide that it shows beside them.

    Args:
        line: where it is drawn, by the places that `pieces` name.
        pieces: how many lines will be drawn over each; see `kvtool.report.dodge.covered`.
    """
    for (start, end), count in pieces.items():
        x, y = zip(line[start], line[end], strict=True)
        panel.plot(x, y, color=colour, linewidth=_LINE + _BESIDE * count, zorder=1.5)


def score_axis(panel: Axes, results: Sequence[TaskResult]) -> None:
    """Take a log scale where a perplexity explodes, so that the other variants stay apart."""
    values = [result.value for result in results if result.value is not None]
    if results[0].lower_is_better and min(values) > 0 and max(values) / min(values) > 20:
        log_y(panel)


def whole_ticks(axis: Axis) -> None:
    """Put ticks at whole numbers only, otherwise where matplotlib puts them."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))


def log_y(panel: Axes) -> None:
    """Take a log scale with plain numbers."""
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.yaxis.set_minor_formatter(lambda value, _: "")
