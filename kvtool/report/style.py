"""How every picture looks: one colour and marker per policy, no global matplotlib state.

Colours are Okabe and Ito's, which colour-blind readers tell apart, without the black, which the
full cache has, and with Tol's grey for the yellow, which is lost on white.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.documents.files import write_with
from kvtool.documents.results import ResultsDocument
from kvtool.report.variants import FULL, families

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#777777")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_DASHES = ("-", "--", "-.", ":")
GRID, FRONT = "#dddddd", "#d5d5d5"
FULL_LINE: dict[str, Any] = {
    "color": "black",
    "linestyle": ":",
    "linewidth": 1.4,
    "zorder": 3,
}  # over the others
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
        rank, shape = 0, codecs.index(family.codec)
        colour = "black"
        if family.base != FULL:
            rank = bases.index(family.base)
            colour = _COLOURS[rank % len(_COLOURS)]
        if len(codecs) == 1:
            shape = rank
        else:  # other markers for bases whose colours come again
            shape += rank // len(_COLOURS) * len(codecs)
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
