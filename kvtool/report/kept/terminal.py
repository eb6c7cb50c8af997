"""The kept text on a terminal: shaded where there are colours, in brackets where there are none."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.style import Style
from rich.text import Text

from kvtool.report.colour_scale import colour_at, ink_on
from kvtool.report.kept.shaded import MARKS, doing

if TYPE_CHECKING:
    from kvtool.report.kept.shaded import ShadedText

_STEPS = 6
# from few layers and heads to all of them
SHADES = tuple("#{:02x}{:02x}{:02x}".format(*colour_at(i / (_STEPS - 1))) for i in range(_STEPS))
_HALF = 0.5  # of the layers and heads


def coloured_text(shown: ShadedText) -> Text:
    """Return the text, each token on a background of its shade: see `KeptTokens.shade`.

    Tokens that no head holds are dim; merged and offloaded ones are underlined.
    """
    kept = shown.kept
    under = [False] * kept.tokens
    if kept.mark in MARKS:
        under = (kept.marked_share >= _HALF).tolist()
    shades, held = kept.shade.tolist(), (kept.share > 0).tolist()
    text = Text()
    for piece, *look in zip(shown.pieces, shades, held, under, strict=True):
        text.append(piece, _style(*look))
    return text


def _style(shade: float, held: bool, underline: bool) -> Style:
    if shade == 0:
        return Style(dim=not held, underline=underline)
    rank = min(int(shade * len(SHADES)), len(SHADES) - 1)
    return Style(color=ink_on(rank / (_STEPS - 1)), bgcolor=SHADES[rank], underline=underline)


def legend(shown: ShadedText) -> Text:
    """Return what the shades mean."""
    text = Text("evicted", _style(0, False, False))
    for rank in range(len(SHADES)):
        shade = rank / len(SHADES)
        text.append(f" {(rank + 1) * 100 // len(SHADES)}% ", _style(shade or 0.01, True, False))
    text.append(f" of the layers and heads {doing(shown.kept)}")
    if shown.kept.mark in MARKS:
        text.append("; ")
        text.append(MARKS[shown.kept.mark], _style(0, True, True))
    return text


def legend_of_brackets(shown: ShadedText) -> str:
    """Return what the brackets mean."""
    return f"[..]: at least half of the layers and heads {doing(shown.kept)}"


def in_brackets(shown: ShadedText) -> str:
    """Return the text with what at least half of the layers and heads hold in brackets.

    Of a reader, with what at least half of them have read lately.
    """
    shades = shown.kept.shade.tolist()
    pairs = zip(shown.pieces, (shade >= _HALF for shade in shades), strict=True)
    runs = []
    for held, run in groupby(pairs, key=lambda pair: pair[1]):
        joined = "".join(piece for piece, _ in run)
        runs.append(f"[{joined}]" if held else joined)
    return "".join(runs)
