"""The scale of colours: its order in every kind of eyes, and the text on it."""

import numpy as np
import pytest

from kvtool.report.colour_scale import CIVIDIS, colour_at, ink_on
from kvtool.report.kept.text import SHADES
from tests.colour_vision import keeps_order, lightness

STEPS = [i / 20 for i in range(21)]
RED_YELLOW_GREEN = [(240, 73, 110), (235, 184, 57), (12, 215, 159)]  # of Kamradt's needle maps


def test_the_scale_keeps_its_order_without_red_and_green():
    assert keeps_order(colour_at(step) for step in STEPS)
    assert not keeps_order(RED_YELLOW_GREEN)  # so the test can fail


def test_pictures_and_terminals_have_the_same_scale():
    colormaps = pytest.importorskip("matplotlib").colormaps
    drawn = [[round(255 * part) for part in colormaps[CIVIDIS](step)[:3]] for step in STEPS]
    assert keeps_order(drawn)
    assert np.array(drawn) == pytest.approx(np.array([colour_at(step) for step in STEPS]), abs=9)
    assert colour_at(-1) == colour_at(0)
    assert colour_at(2) == colour_at(1)


def test_numbers_are_legible_on_every_colour():
    for step in STEPS:
        paper, ink = lightness(colour_at(step)), {"black": 0, "white": 100}[ink_on(step)]
        assert abs(paper - ink) > 45, step


def test_the_shades_of_the_kept_text_keep_their_order_on_a_terminal():
    shades = [tuple(bytes.fromhex(shade.removeprefix("#"))) for shade in SHADES]
    assert keeps_order(shades)
    assert shades == [colour_at(i / (len(shades) - 1)) for i in range(len(shades))]
