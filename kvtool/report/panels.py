"""Panels of lines: how many in a row, a legend that covers no data, log axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.report.arms import wrap
from kvtool.report.style import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACROSS = 3  # panels in a row
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
    named = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        named.update(zip(labels, handles, strict=True))
    labels = [wrap(label, 26) for label in named]
    lines = sum(label.count("\n") + 1 for label in labels)
    figure.set_figheight(max(figure.get_figheight(), 0.18 * lines + 0.3))
    figure.legend(list(named.values()), labels, loc="outside right upper", frameon=False)


def log_y(panel: Axes) -> None:
    """Take a log scale with plain numbers."""
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.yaxis.set_minor_formatter(lambda value, _: "")
