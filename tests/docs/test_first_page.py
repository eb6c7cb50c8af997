"""The picture of the first page is the one that its recipe's results give."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "first-page"
RESULTS = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def drawing():
    spec = importlib.util.spec_from_file_location("draw_first_page", FOLDER / "draw.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("name", ["light", "dark"])
def test_the_picture_is_what_its_results_give(drawing, name, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["draw.py", str(FOLDER / "results.json"), str(tmp_path)])
    drawing.main()
    assert (tmp_path / f"{name}.svg").read_bytes() == (FOLDER / f"{name}.svg").read_bytes()


def test_the_results_are_those_of_the_recipe():
    recipe = yaml.safe_load((FOLDER.parent / "first-page.yaml").read_text(encoding="utf-8"))
    arms = {(arm["policy"], arm["budget"]) for arm in RESULTS["arms"]}
    swept = {
        (policy, tokens) for policy in recipe["policy"] for tokens in recipe["budget"]["tokens"]
    }
    assert arms == swept | {("full", None)}
    assert RESULTS["complete"]
    assert RESULTS["model"]["id"] == "reference"
    task = recipe["eval"]["tasks"][0]
    for result in RESULTS["results"]:
        assert result["task"] == task["task"]
        assert result["n"] == task["depths"] * task["samples"]
        assert result["settings"]["lengths"] == [1024]


def test_a_point_stands_where_its_score_and_bytes_are(drawing):
    """Worked by hand: the panel's left and lower edges are 64 and 276, it is 456 wide, 232 high.

    The x axis runs from 5 % to 112 %: the full cache is at ln 20 / ln 22.4 = 0.9635 of it.
    """
    by_arm = {result["arm"]: result for result in RESULTS["results"]}
    points = drawing.read_points(RESULTS)["h2o"]
    for point, tokens in zip(points, (64, 128, 256, 512), strict=True):
        result = by_arm[f"h2o@{tokens}"]
        cost = result["cost"]
        assert point.score == result["value"]
        assert point.share == (cost["kv_bytes"] + cost["state_bytes"]) / cost["full_bytes"]
    picture = drawing.draw(RESULTS, drawing.THEMES["light"])
    assert '<circle cx="503.4" cy="44.0"' in picture  # 64 + 0.9635 * 456; a score of 1
    x = 64 + 456 * math.log(points[0].share / 0.05) / math.log(22.4)
    found = re.findall(r'translate\(([\d.]+) ([\d.]+)\)" d="([^"]+)"', picture)
    places = [(float(x), float(y)) for x, y, _ in found]
    assert any(spot == pytest.approx((x, 276 - 232 * points[0].score), abs=0.06) for spot in places)
    assert len({shape for _, _, shape in found}) == 5  # a marker for each policy


def test_whiskers_are_95_percent_intervals(drawing):
    """As in reports: that of the paired difference, upon the full cache's score of 1."""
    first = drawing.read_points(RESULTS)["h2o"][0]
    pair = next(each for each in RESULTS["results"] if each["arm"] == "h2o@64")["paired"]
    assert (first.low, first.high) == (1 + pair["low"], 1 + pair["high"])
    assert first.low < first.score < first.high


def test_the_first_page_tells_these_results():
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    told = re.search(
        r"budget of (\d+) tokens, about (\d+) % of the memory, `h2o` answers (\d+) % and `roco` "
        r"(\d+) %\. `h2o\+calidrop` answers (\d+) %: .* decodes at ([\d.]+) times the speed",
        page,
    )
    tokens, share, h2o, roco, calidrop, speed = (float(number) for number in told.groups())
    found = {result["arm"]: result for result in RESULTS["results"]}
    at = {name: found[f"{name}@{tokens:.0f}"] for name in ("h2o", "roco", "h2o+calidrop")}
    assert [round(100 * at[name]["value"]) for name in at] == [h2o, roco, calidrop]
    for result in at.values():
        cost = result["cost"]
        held = (cost["kv_bytes"] + cost["state_bytes"]) / cost["full_bytes"]
        assert 100 * held == pytest.approx(share, abs=1.5)
    rates = [
        found[arm]["cost"]["decode_tokens_per_s"] for arm in (f"h2o+calidrop@{tokens:.0f}", "full")
    ]
    assert rates[0] / rates[1] == pytest.approx(speed, abs=0.05)
    assert f"{found['full']['n']} hidden codes a point" in page
