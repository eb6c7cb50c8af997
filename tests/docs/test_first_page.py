"""Picture, table and numbers of the first page are those of the real model's results."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from pathlib import Path

import pytest

from kvtool import parse_policy
from kvtool.evaluation.run.index import read_results_file
from kvtool.evaluation.verdict import between

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "first-page"
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
BITS = (ROOT / "kvtool/policies/reference.md").read_text(encoding="utf-8")


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
        name: {result["variant"]: result for result in results["results"]}
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
        for variant in ("keydiff@128", "kvzip@512", "full+int4"):
            share = drawing.held_bytes(found[name][variant]) / drawing.held_bytes(
                found[name]["full"]
            )
            x = left + 314 * math.log(share / 0.1) / math.log(12)
            spot = pytest.approx((x, 264 - 202 * found[name][variant]["value"]), abs=0.06)
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
    place = r"\[`(\S+)`\]\(recipes/real-model/README\.md#([a-z0-9-]+)\)"
    rows = re.findall(rf"^\| {place} \| .* \| (\d+) % \| {cells} \| {cells} \|$", section, re.M)
    assert len(rows) >= 9
    linked = (ROOT / "recipes/real-model/README.md").read_text(encoding="utf-8")
    for policy, anchor, share, *shown in rows:
        assert f'| <a id="{anchor}"></a>`{policy}` |' in linked
        known = found["known"]
        held = drawing.held_bytes(known[variant(policy, 256)]) / drawing.held_bytes(known["full"])
        assert float(share) == round(100 * held)
        for name, cell in zip(("known", "later"), shown, strict=True):
            scores = [found[name][variant(policy, budget)]["value"] for budget in (256, 512)]
            scores = scores[:1] if policy.startswith("full") else scores  # takes no budget
            assert cell == "/".join(f"{100 * score:.0f}" for score in scores)


@pytest.fixture(scope="module")
def runs() -> dict:
    """What the first page recommends by: each policy's result, by question and budget."""
    found = {}
    for name in ("known", "later"):
        run = read_results_file(ROOT / f"recipes/real-model/results/{name}.json")
        variants = {variant.name: variant for variant in run.variants}
        for result in run.results:
            variant = variants[result.variant]
            found[name, variant.policy, variant.budget] = result
    return found


QUESTIONS = ("known", "later")


def near_full(runs, policy, question, budget) -> bool:
    """Whether a policy misses at most one code in twenty that the full cache finds."""
    return runs[question, policy, budget].value >= 0.95 * runs[question, "full", None].value


def surely_above(ours, theirs) -> bool:
    found = between(ours, theirs)
    return found is not None and found.low is not None and found.low > 0


def fits(runs):
    assert all(runs[question, "full", None].value > 0.9 for question in QUESTIONS)


def bits_cost_less_than_tokens(runs):
    """No policy that evicts finds surely more, in no more memory."""
    for question in QUESTIONS:
        ours = runs[question, "full+int8", None]
        assert near_full(runs, "full+int8", question, None)
        for (asked, _, budget), theirs in runs.items():
            if asked == question and budget and theirs.cost.held_bytes <= ours.cost.held_bytes:
                assert not surely_above(theirs, ours), theirs.variant


def bits_in_less_memory(runs):
    for question in QUESTIONS:
        assert near_full(runs, "full+int4", question, None)
        int4, int8 = (runs[question, f"full+int{bits}", None] for bits in (4, 8))
        assert int4.cost.held_bytes < int8.cost.held_bytes
        assert not surely_above(runs[question, "kvzip", 256], int4)


def test_bits_that_every_model_bears_come_first():
    """And the row of 4 bits says what a model with biases on its keys finds."""
    section = PAGE.split("## Which policy when")[1].split("\n## ")[0]
    assert (
        section.index("[`full+int8`]") < section.index("`full+k8v4`") < section.index("full+int4")
    )
    row = next(line for line in section.splitlines() if line.startswith("| [`full+int4`]"))
    assert "Qwen2.5-Coder-0.5B" in row
    found = re.search(r"\n\| Qwen2\S+ \| of 20 codes .*\| (\d\.\d+), (\d\.\d+) \|\n", BITS)
    assert found
    assert {float(share) for share in found.groups()} == {1.0}
    assert "finds all of 20 codes known and of 20 later" in row
    assert "full+int4" not in "".join(re.findall(r"^kvtool generate .*", section, re.M))


def one_text_many_questions(runs):
    for budget in (256, 512):
        assert near_full(runs, "kvzip", "later", budget)
        others = [
            result
            for (question, policy, at), result in runs.items()
            if (question, at) == ("later", budget) and parse_policy(policy).when != "never"
        ]
        assert runs["later", "kvzip", budget].value == max(each.value for each in others)


def nothing_lost(runs):
    for question in QUESTIONS:
        full = runs[question, "full", None].cost
        for budget in (256, 512):
            assert near_full(runs, "quest", question, budget)
            own = runs[question, "quest", budget].cost
            assert own.held_bytes >= full.held_bytes
            assert own.traffic_bytes < full.traffic_bytes


def fast_steps_where_the_question_is_known(runs):
    for budget in (256, 512):
        assert near_full(runs, "rocketkv", "known", budget)
        own, full = runs["known", "rocketkv", budget], runs["known", "full", None]
        assert own.cost.traffic_bytes < full.cost.traffic_bytes


def best_of_those_that_hold_the_budget(runs):
    def best(budget):
        found = {
            policy: result.value
            for (question, policy, at), result in runs.items()
            if (question, at) == ("later", budget) and parse_policy(policy).when == "always"
        }
        return max(found, key=found.get)

    assert (best(256), best(512)) == ("keydiff", "rkv")


def for_a_known_question_alone(runs):
    for budget in (256, 512):
        assert near_full(runs, "snapkv", "known", budget)
        assert surely_above(runs["known", "snapkv", budget], runs["later", "snapkv", budget])


def promises_nothing(runs):
    """What such a row says is of the policy, not of the results."""


RECOMMENDED = {
    "it fits": fits,
    "memory is short: fewer bits cost less than fewer tokens": bits_cost_less_than_tokens,
    "memory is shorter still": bits_in_less_memory,
    "one text is asked often": one_text_many_questions,
    "nothing may be lost: it saves no memory": nothing_lost,
    "steps are slow, and the question is in the prompt": fast_steps_where_the_question_is_known,
    "you chat: at 256, best later of those that hold the budget after every token (at 512 `rkv` "
    "is)": best_of_those_that_hold_the_budget,
    "the question is in the prompt, and no other follows": for_a_known_question_alone,
    "a stream has no end": promises_nothing,
    "you decode long answers at a fixed size: measure it on your task first": promises_nothing,
}
"""What the table says of when to take a policy, and the check that its results bear it out."""


def test_every_recommendation_has_a_check():
    section = PAGE.split("## Which policy when")[1].split("\n## ")[0]
    said = re.findall(r"^\| \[`\S+\) \| (.*?) \| \d+ % ", section, re.M)
    assert len(said) == len(RECOMMENDED)
    for text, beginning in zip(said, RECOMMENDED, strict=True):
        assert text.startswith(beginning)


def test_no_cell_contradicts_what_the_first_page_recommends(runs):
    for check in RECOMMENDED.values():
        check(runs)


def test_the_perplexity_of_novels_is_as_said():
    """Of the policies that hold the budget after every token, RoCo loses least at each."""
    run = read_results_file(ROOT / "recipes/real-model/results/novels.json")
    value = {result.variant: result.value for result in run.results}
    page = " ".join(PAGE.split())
    numbers = re.search(
        r"at 256, `roco` adds ([\d.]+) to a perplexity of ([\d.]+), `keydiff` adds ([\d.]+), and "
        r"`random` ([\d.]+)",
        page,
    )
    roco, full, keydiff, random = map(float, numbers.groups())
    assert full == round(value["full"], 1)
    for said, name in ((roco, "roco"), (keydiff, "keydiff"), (random, "random")):
        assert said == pytest.approx(value[f"{name}@256"] - value["full"], abs=0.05)
    for budget in (256, 512, 1024):
        held = ("random", "streaming", "h2o", "h2o+caote", "tova", "keydiff")
        assert all(value[f"roco@{budget}"] < value[f"{name}@{budget}"] for name in held)


def test_the_caption_has_these_results(drawing, found):
    page = " ".join(PAGE.split())
    numbers = re.search(
        r"`full\+int8` keeps every token in 8 bits: (\d+) % of the memory, (\d+) % of the codes "
        r"\(full cache: (\d+) %\)\. `full\+int4` takes (\d+) % and finds (\d+) %\. .*"
        r"with 256 of 1024 tokens, `snapkv` finds (\d+) % if the question "
        r"is known while it evicts, and (\d+) % if it comes later",
        page,
    )
    *of_bits, known, later = (int(number) for number in numbers.groups())
    share_8, int8, full, share_4, int4 = of_bits
    variants = found["known"]
    for share, score, name in ((share_8, int8, "full+int8"), (share_4, int4, "full+int4")):
        held = drawing.held_bytes(variants[name]) / drawing.held_bytes(variants["full"])
        assert share == round(100 * held)
        assert score == 100 * variants[name]["value"]
    assert full == 100 * variants["full"]["value"]
    assert known == 100 * variants["snapkv@256"]["value"]
    assert later == 100 * found["later"]["snapkv@256"]["value"]
    assert {result["n"] for each in found.values() for result in each.values()} == {100}
    assert "100 texts a point" in page
