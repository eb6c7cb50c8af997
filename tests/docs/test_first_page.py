"""Picture, table and numbers of the first page are those of the real model's results."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "first-page"
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def drawing():
    spec = importlib.util.spec_from_file_location("draw_first_page", FOLDER / "draw.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def found(drawing) -> dict:
    """Results by panel and variant."""
    return {
        name: {result["arm"]: result for result in results["results"]}
        for name, results in drawing.read_results().items()
    }


@pytest.mark.parametrize("name", ["light", "dark"])
def test_the_picture_is_what_its_results_give(drawing, name, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["draw.py", str(tmp_path)])
    drawing.main()
    assert (tmp_path / f"{name}.svg").read_bytes() == (FOLDER / f"{name}.svg").read_bytes()


def test_a_point_is_where_its_score_and_bytes_are(drawing, found):
    """Worked by hand: the panels begin at 58 and 422, and are 314 wide and 202 high, above 264.

    The x axis runs from 10 % to 120 %: the full cache is at ln 10 / ln 12 = 0.9266 of it.
    """
    picture = drawing.draw(drawing.read_results(), drawing.THEMES["light"])
    for left, full in ((58, "349.0"), (422, "713.0")):
        assert f'<circle cx="{left + 314 * math.log(10) / math.log(12):.1f}"' in picture
        assert f'<circle cx="{full}" cy="70.1"' in picture  # 264 - 0.96 * 202
    marks = re.findall(r'translate\(([\d.]+) ([\d.]+)\)" d="([^"]+)"', picture)
    places = [(float(x), float(y)) for x, y, _ in marks]
    for left, name in ((58, "known"), (422, "later")):
        for arm in ("keydiff@128", "kvzip@512", "full+int4"):
            share = drawing.held_bytes(found[name][arm]) / drawing.held_bytes(found[name]["full"])
            x = left + 314 * math.log(share / 0.1) / math.log(12)
            spot = pytest.approx((x, 264 - 202 * found[name][arm]["value"]), abs=0.06)
            assert any(place == spot for place in places)
    assert len({shape for _, _, shape in marks}) == len(drawing.SERIES)  # a marker for each


def test_all_points_are_in_the_panels(drawing):
    for results in drawing.read_results().values():
        for points in drawing.read_points(results).values():
            assert points
            for point in points:
                assert drawing.LEAST < point.share < drawing.MOST
                assert 0 <= point.low <= point.score <= point.high <= 1


def test_whiskers_are_95_percent_intervals(drawing, found):
    """As in reports: that of the paired difference, upon the full cache's score."""
    first = drawing.read_points(drawing.read_results()["known"])["keydiff"][0]
    pair = found["known"]["keydiff@128"]["paired"]
    assert (first.low, first.high) == (0.96 + pair["low"], 0.96 + pair["high"])
    assert first.low < first.score < first.high


def variant(policy: str, budget: int) -> str:
    return policy if policy.startswith("full") else f"{policy}@{budget}"


def test_the_table_of_the_first_page_has_these_results(drawing, found):
    """A row: memory at 256 tokens, then codes found at 256 and 512, known and later."""
    section = PAGE.split("## Which policy when")[1].split("\n## ")[0]
    cells = r"([\d/]+)"
    rows = re.findall(rf"^\| `(\S+)` \| .* \| (\d+) % \| {cells} \| {cells} \|$", section, re.M)
    assert len(rows) >= 9
    for policy, share, *shown in rows:
        known = found["known"]
        held = drawing.held_bytes(known[variant(policy, 256)]) / drawing.held_bytes(known["full"])
        assert float(share) == round(100 * held)
        for name, cell in zip(("known", "later"), shown, strict=True):
            scores = [found[name][variant(policy, budget)]["value"] for budget in (256, 512)]
            scores = scores[:1] if policy.startswith("full") else scores  # takes no budget
            assert cell == "/".join(f"{100 * score:.0f}" for score in scores)


def test_the_caption_has_these_results(drawing, found):
    page = " ".join(PAGE.split())
    numbers = re.search(
        r"`full\+int4` keeps every token in 4 bits: (\d+) % of the memory, (\d+) % of the codes "
        r"\(full cache: (\d+) %\).*with 256 of 1024 tokens, `snapkv` finds (\d+) % if the question "
        r"is known while it evicts, and (\d+) % if it comes later",
        page,
    )
    share, int4, full, known, later = (int(number) for number in numbers.groups())
    arms = found["known"]
    held = drawing.held_bytes(arms["full+int4"]) / drawing.held_bytes(arms["full"])
    assert share == round(100 * held)
    assert int4 == 100 * arms["full+int4"]["value"]
    assert full == 100 * arms["full"]["value"]
    assert known == 100 * arms["snapkv@256"]["value"]
    assert later == 100 * found["later"]["snapkv@256"]["value"]
    assert {result["n"] for each in found.values() for result in each.values()} == {100}
    assert "100 texts a point" in page
