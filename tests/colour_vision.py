"""How a picture's colours look to a reader who lacks the middle-wave cones (deuteranopia).

Vienot, Brettel and Mollon, "Digital video colourmaps for checking the legibility of displays by
dichromats", Color Research and Application 24 (1999), equations 2 to 7.
"""

from collections.abc import Iterable

import numpy as np

# Linear red, green and blue of a screen to long, middle and short cones (equation 4).
TO_CONES = np.array(
    [
        [17.8824, 43.5161, 4.11935],
        [3.45565, 27.1554, 3.86714],
        [0.0299566, 0.184309, 1.46709],
    ]
)


def deuteranope() -> np.ndarray:
    """The matrix (3, 3) on linear RGB: M becomes a L + b S, white and blue stay as they are."""
    (long, middle, short), blue = TO_CONES @ [1, 1, 1], TO_CONES @ [0, 0, 1]
    a, b = np.linalg.solve([[long, short], [blue[0], blue[2]]], [middle, blue[1]])
    without_middle = np.array([[1, 0, 0], [a, 0, b], [0, 0, 1]])
    return np.linalg.inv(TO_CONES) @ without_middle @ TO_CONES


def seen(colour: Iterable[int]) -> np.ndarray:
    """Red, green and blue, 0 to 255, as a deuteranope sees them (gamma 2.2, as in the paper)."""
    linear = (np.array(list(colour)) / 255) ** 2.2
    shifted = 0.992052 * linear + 0.003974  # keeps all that follows inside what a screen shows
    return 255 * np.clip(deuteranope() @ shifted, 0, 1) ** (1 / 2.2)


def lightness(colour: Iterable[float]) -> float:
    """CIE L*, 0 to 100, of red, green and blue from 0 to 255."""
    linear = (np.array(list(colour)) / 255) ** 2.2
    luminance = float(linear @ [0.2126, 0.7152, 0.0722])
    return 116 * luminance ** (1 / 3) - 16 if luminance > (6 / 29) ** 3 else 903.3 * luminance


def keeps_order(colours: Iterable[Iterable[int]]) -> bool:
    """Whether each colour of a scale looks lighter than the one before, in both kinds of eyes."""
    colours = [tuple(colour) for colour in colours]
    plain = np.diff([lightness(colour) for colour in colours])
    other = np.diff([lightness(seen(colour)) for colour in colours])
    return bool((plain > 0).all() and (other > 0).all()) or bool(
        (plain < 0).all() and (other < 0).all()
    )
