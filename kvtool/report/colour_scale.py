"""The scale of colours for numbers: cividis, dark blue to yellow.

Its lightness grows evenly, so it reads in grey, too, and looks alike to those who see red and green
as one (Nunez, Anderton and Renslow, 2018, https://doi.org/10.1371/journal.pone.0199239).
"""

from __future__ import annotations

CIVIDIS = "cividis"  # as matplotlib calls it
INK = {"black": "#010101", "white": "#fefefe"}  # in pictures, which no dark page turns round
_ANCHORS = (  # matplotlib's cividis in steps of a tenth
    *("#00224E", "#083370", "#35456C", "#4F576C", "#666970", "#7D7C78"),
    *("#948E77", "#AEA371", "#C8B866", "#E5CF52", "#FEE838"),
)


def colour_at(share: float) -> tuple[int, int, int]:
    """Return the red, green and blue of a share of the scale.

    >>> colour_at(0.0), colour_at(1.0)
    ((0, 34, 78), (254, 232, 56))
    """
    place = min(max(share, 0.0), 1.0) * (len(_ANCHORS) - 1)
    below = min(int(place), len(_ANCHORS) - 2)
    low, high, part = _rgb(_ANCHORS[below]), _rgb(_ANCHORS[below + 1]), place - below
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return red, green, blue


def ink_on(share: float) -> str:
    """Return the colour of the text that is read best on a share of the scale.

    >>> ink_on(0.0), ink_on(1.0)
    ('white', 'black')
    """
    light = [_linear(part) for part in colour_at(share)]
    luminance = 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2]
    return "black" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "white"


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _linear(part: int) -> float:
    """Undo the gamma of sRGB (WCAG 2.2, relative luminance)."""
    value = part / 255
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
