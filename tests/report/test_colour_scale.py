"""The scale of colours: its order in every kind of eyes, and the text on it."""

import re

import numpy as np
import pytest

from kvtool.package_data import data_file
from kvtool.report.colour_scale import CIVIDIS, colour_at, ink_on
from kvtool.report.kept.terminal import SHADES
from tests.colour_vision import deuteranope, keeps_order, lightness, seen

DARK = "(prefers-color-scheme: dark)"
STEPS = [i / 20 for i in range(21)]
RED_YELLOW_GREEN = [(240, 73, 110), (235, 184, 57), (12, 215, 159)]  # of Kamradt's needle maps


def test_the_simulation_is_the_published_one():
    to_cones = np.array([[17.8824, 43.5161, 4.11935], [3.45565, 27.1554, 3.86714]])
    red = np.array([1.0, 0, 0])
    long, short = to_cones[0] @ red, 0.0299566
    middle = 0.494207 * long + 1.24827 * short  # the paper's deuteranope
    cones = np.vstack([to_cones, [0.0299566, 0.184309, 1.46709]]) @ deuteranope() @ red
    assert cones == pytest.approx([long, middle, short], rel=1e-4)
    assert deuteranope() @ [1, 1, 1] == pytest.approx([1, 1, 1])
    red, green = seen((200, 60, 60)), seen((100, 125, 60))
    assert abs(red - green).max() < 25  # which are far apart to others


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


def test_the_shades_of_the_kept_text_keep_their_order_on_its_page():
    sheet = data_file("report/kept/kept.css").read_text()
    shade = [int(part) for part in re.findall(r"--shade: (\d+), (\d+), (\d+)", sheet)[0]]
    papers = [bytes.fromhex(paper) for paper in re.findall(r"--paper: #([0-9a-f]{6})", sheet)]
    for paper, query in zip(papers, ("not (prefers-color-scheme: dark)", DARK), strict=False):
        within = sheet[sheet.index(f"@media {query}") :].partition("\n}")[0]
        alphas = [float(part) for part in re.findall(r"--a: ([\d.]+)", within)]
        assert len(alphas) == 8
        assert keeps_order(
            [a * x + (1 - a) * y for x, y in zip(shade, paper, strict=True)] for a in [0, *alphas]
        )
