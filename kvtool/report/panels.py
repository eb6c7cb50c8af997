"""Panels of lines: how many in a row, a legend that covers no data, log axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtool.report.style import new_figure
from kvtool.report.variants import wrap

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
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
    named: dict[str, Artist] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        named.update(zip(map(str, labels), handles, strict=True))
    wrapped = [wrap(label, 26) for label in named]
    lines = sum(label.count("\n") + 1 for label in wrapped)
    figure.set_figheight(max(figure.get_figheight(), 0.18 * lines + 0.3))
    figure.legend(
        handles=list(named.values()), labels=wrapped, loc="outside right upper", frameon=False
    )


def whole_ticks(axis: Axis) -> None:
    """Put ticks at whole numbers only, otherwise where matplotlib puts them."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))


def log_y(panel: Axes) -> None:
    """Take a log scale with plain numbers."""
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.yaxis.set_minor_formatter(lambda value, _: "")
