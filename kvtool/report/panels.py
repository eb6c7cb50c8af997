"""Draw panels: the look of each policy, points with whiskers, a legend that covers no data.

Points and lines that would hide each other are set side by side, or widened so that both show.
Every policy has one colour and one marker, and no state of matplotlib outlives a picture.

Colours are Okabe and Ito's, which colour-blind readers can distinguish, without the black, which
the full cache has, and with Tol's grey for the yellow, which is lost on white.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.documents.files import write_with
from kvtool.report import formats
from kvtool.report.colour_scale import CIVIDIS, INK, ink_on
from kvtool.report.variants import FULL, families, wrap

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from kvtool.documents.results import ResultsDocument, TaskResult


_NEAR = 0.005  # of the range of all lines: closer ones hide each other


def neighbours(places: Sequence[float], *, near: float) -> list[list[int]]:
    """Return the indices of places that are nearly the same, groups and members ascending.

    Neighbours that differ by a factor of at most `near` make a group, equal ones in the order
    given.

    >>> neighbours([64.0, 256.0, 65.0], near=1.1)
    [[0, 2], [1]]
    """
    order = sorted(range(len(places)), key=lambda i: (places[i], i))
    groups = [order[:1]] if order else []
    for before, i in pairwise(order):
        if places[i] <= places[before] * near:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def dodge(places: Sequence[float], *, near: float, step: float) -> list[float]:
    """Return places on a log axis, moved apart where several are nearly the same.

    The members of each group of `neighbours` are drawn `step` (a factor) apart in their order,
    around the group's middle.

    >>> dodge([64.0, 64.0, 256.0], near=1.0, step=4.0)
    [32.0, 128.0, 256.0]
    """
    moved = list(places)
    for group in neighbours(places, near=near):
        for rank, i in enumerate(group if len(group) > 1 else []):
            middle = (places[group[0]] * places[group[-1]]) ** 0.5
            moved[i] = middle * step ** (rank - (len(group) - 1) / 2)
    return moved


def covered(
    lines: Sequence[Mapping[float, float | None]], colours: Sequence[str] | None = None
) -> list[dict[tuple[float, float], int]]:
    """Return, for each line, its pieces that later lines lie on, and of how many colours these are.

    >>> covered([{1: 0.5, 2: 0.5, 3: 0.5}, {1: 0.0, 2: 1.0}, {1: 0.5, 2: 0.5, 3: 0.0}])
    [{(1, 2): 1}, {}, {}]

    Args:
        lines: y by x, x ascending; None and NaN are gaps.
        colours: of each line; None: all differ. A line covers none of its own colour.
    """
    drawn_in = range(len(lines)) if colours is None else colours
    drawn = [
        {x: y for x, y in line.items() if y is not None and not math.isnan(y)} for line in lines
    ]
    values = [y for line in drawn for y in line.values()]
    near = _NEAR * (max(values) - min(values)) if values else 0.0
    found: list[dict[tuple[float, float], int]] = []
    for i, line in enumerate(drawn):
        found.append({})
        for piece in pairwise(line):
            over = {
                drawn_in[j]
                for j in range(i + 1, len(drawn))
                if drawn_in[j] != drawn_in[i]
                and all(x in drawn[j] and abs(drawn[j][x] - line[x]) <= near for x in piece)
            }
            if over:
                found[i][piece] = len(over)
    return found


def pareto_front(points: Sequence[tuple[float, float]], *, lower_is_better: bool) -> list[int]:
    """Return the indices of the points that none of the others beats, costs ascending.

    A point is beaten by one that costs no more and scores no worse, and does better in one of both;
    of equal points, all stay.

    >>> pareto_front([(1.0, 0.2), (2.0, 0.9), (3.0, 0.5), (4.0, 1.0)], lower_is_better=False)
    [0, 1, 3]

    Args:
        points: of each, its cost and its score.
    """
    losses = [(cost, score if lower_is_better else -score) for cost, score in points]
    kept = [
        i
        for i, mine in enumerate(losses)
        if not any(a <= mine[0] and b <= mine[1] and (a, b) != mine for a, b in losses)
    ]
    return sorted(kept, key=lambda i: (points[i][0], i))


_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#777777")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_DASHES = ("-", "--", "-.", ":")
GRID, FRONT = "#dddddd", "#d5d5d5"
FULL_LINE: dict[str, Any] = {"color": "black", "linestyle": ":", "linewidth": 1.4, "zorder": 3}
"""The full cache's line, over the others."""

_SETTINGS = {
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "Verdana"],  # ours, and one as wide where it is missing
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "hatch.linewidth": 0.8,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "svg.fonttype": "none",
    "svg.hashsalt": "kvtool",
}


_METADATA = {  # neither a date nor matplotlib's version, which would change the bytes
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "png": {"Software": None},
}


@dataclass(frozen=True)
class Look:
    """The colour and marker of a policy, the same in every picture of a document."""

    colour: str
    marker: str
    dashes: str = "-"


def looks(document: ResultsDocument) -> dict[str, Look]:
    """Return a look for every family of variants by its label.

    The full cache is black and dotted, policies whose budget is what they read are dashed. Policies
    that differ in their codec only share a colour, and codecs have a marker each.
    """
    groups = families(document)
    bases = list(dict.fromkeys(family.base for family in groups if family.base != FULL))
    codecs = list(dict.fromkeys([None, *(family.codec for family in groups)]))
    found = {}
    for family in groups:
        if family.is_full:
            found[family.label] = Look("black", "", ":")
            continue
        rank = 0 if family.base == FULL else bases.index(family.base)
        colour = "black" if family.base == FULL else _COLOURS[rank % len(_COLOURS)]
        shape = rank
        if len(codecs) > 1:  # other markers for bases whose colours come again
            shape = codecs.index(family.codec) + rank // len(_COLOURS) * len(codecs)
        dashes = "--" if family.reads else "-"
        found[family.label] = Look(colour, _MARKERS[shape % len(_MARKERS)], dashes)
    return found


def dashed(look: Look, rank: int) -> Look:
    """Return the look of the budget of this rank, where the lines of one policy are compared."""
    if not look.marker:
        return look
    shift = _MARKERS.index(look.marker) + rank
    return Look(look.colour, _MARKERS[shift % len(_MARKERS)], _DASHES[rank % len(_DASHES)])


@contextmanager
def drawing() -> Iterator[None]:
    """Draw and save under our settings, whatever the user's matplotlibrc says."""
    from matplotlib import style

    with style.context(["default", _SETTINGS]):
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, sizes in inches, that keeps labels from overlapping by itself."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=200)


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically in the format of the suffix, the same bytes every time."""
    kind = path.suffix.removeprefix(".")
    write_with(path, lambda part: figure.savefig(part, format=kind, metadata=_METADATA.get(kind)))


def svg(figure: Figure) -> str:
    """Return a figure as an SVG document."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=_METADATA["svg"])
    return text.getvalue()


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
        pieces: how many lines will be drawn over each; see `kvtool.report.panels.covered`.
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


def heat_map(
    panel: Axes,
    values: Any,
    *,
    most: float | None = None,
    says: Callable[[float | None], str] | None = None,
) -> AxesImage:
    """Draw numbers as colours, the first row on top, None as a gap.

    Args:
        most: the number at the light end, where the dark one is 0; None: those of the values.
        says: what is written upon a number, unless there are too many.
    """
    import numpy as np
    from matplotlib import colormaps

    numbers = np.array(values, dtype=float)
    colours = colormaps[CIVIDIS].with_extremes(bad="#e6e6e6")
    low = None if most is None else 0.0
    image = panel.imshow(numbers, cmap=colours, vmin=low, vmax=most, aspect="auto")
    if says is not None:
        for (y, x), number in np.ndenumerate(numbers):
            value = None if math.isnan(number) else float(number)
            ink = INK["black" if value is None else ink_on(value / (most or 1.0))]
            panel.text(x, y, says(value), ha="center", va="center", fontsize=6, color=ink)
    panel.spines[:].set_visible(False)
    panel.tick_params(length=0)
    return image


def colour_bar(image: AxesImage, panels: Axes | list[Axes], **about: Any) -> Colorbar:
    """Set the scale of a heat map beside it."""
    bar = image.figure.colorbar(image, ax=panels, aspect=18, **about)
    bar.outline.set_visible(False)
    return bar


def log_tokens(panel: Axes) -> None:
    """Take a log scale across, with numbers of tokens."""
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(lambda value, _: formats.tokens(value))
    panel.minorticks_off()


def log_y(panel: Axes) -> None:
    """Take a log scale with plain numbers."""
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.yaxis.set_minor_formatter(lambda value, _: "")
