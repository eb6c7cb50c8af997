"""The verdict in words, on a terminal and on the page."""

import pytest

from kvtool.documents.verdict import Choice, Interval, Standing, Verdict
from kvtool.report.page import page
from kvtool.report.words import choices_in_words, standings_table, verdict_lines
from tests.report.examples import document


def standing(variant, kind="within", difference=-1.25, low=-3.0, high=0.5, **more):
    numbers = {"difference": difference, "low": low, "high": high}
    return Standing(variant=variant, standing=kind, task="niah", n=33, **numbers | more)


def judged(choices, standings, **changes):
    verdict = Verdict(within=5, why=None, tasks=["niah"], variants=standings, choices=choices)
    results = [result for result in document().results if result.task == "niah"]
    verdict = verdict.model_copy(update=changes)
    update = {"verdict": verdict, "results": results, "averages": [], "gates": []}
    return document().model_copy(update=update)


BYTES = Choice(by="bytes", variant="h2o@64", cost=2048, full=10240, undecided=["snapkv@64"])
TIME = Choice(
    by="time",
    variant="h2o@64",
    cost=0.01,
    full=0.0125,
    undecided=[],
    speed=Interval(value=1.25, low=0.98, high=1.4),
)


def test_each_choice_is_said_with_its_cost_and_how_sure_it_is():
    traffic = Choice(by="traffic", variant=None, cost=None, full=10240, undecided=["a@1", "b@2"])
    lines = verdict_lines(judged([BYTES, traffic, TIME], [standing("h2o@64")]))
    assert lines == [
        "verdict: the cheapest within 5 % of the full cache, by the paired 95 % interval of the"
        " score",
        "  by bytes held: h2o@64; 2.0 KiB of 10.0 KiB (20%); niah -1.2 % (-3.0 to +0.5, n=33);"
        " cheaper, undecided at this n: snapkv@64",
        "  by bytes read per token: undecided at this n: a@1, b@2",
        "  by time per token: h2o@64; 100.0 tokens/s, 1.25x as fast (0.98x to 1.40x, within the"
        " noise); niah -1.2 % (-3.0 to +0.5, n=33)",
    ]


def test_none_says_whether_any_is_within_bounds():
    none = Choice(by="bytes", variant=None, cost=None, full=10240, undecided=[])
    assert verdict_lines(judged([none], [standing("a", "outside")]))[1] == "  by bytes held: none"
    told = verdict_lines(judged([none], [standing("a")]))[1]
    assert told.endswith("none (no variant within 5 % is cheaper than the full cache)")


def test_samples_that_never_differ_say_what_they_may_have_missed():
    """1 - 0.05^(1/33) = 8.7 %."""
    same = standing("h2o@64", difference=0.0, low=0.0, high=0.0)
    told = verdict_lines(judged([BYTES], [same]))[1]
    assert "; niah: none of 33 samples differs (up to 8.7% could, unseen); cheaper" in told


def test_no_verdict_says_why_and_old_results_say_nothing():
    none = judged([], [], why="it needs the full cache beside the others (--baseline)")
    assert verdict_lines(none) == [
        "no verdict: it needs the full cache beside the others (--baseline)"
    ]
    assert choices_in_words(none) == []
    assert verdict_lines(document()) == []


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr("kvtool.report.page.installed", lambda extra: False)


def test_the_page_has_it_above_the_summary(undrawn):
    variants = [
        standing("h2o@64"),
        standing("h2o@128", "undecided", None, None, None, why="2 of 33 samples failed"),
    ]
    shown = judged([BYTES, TIME], variants)
    text = page(shown)
    assert text.index("<h2>Verdict</h2>") < text.index("<h2>Summary</h2>")
    assert "The cheapest within 5 % of the full cache, by the paired" in text
    assert "2.0 KiB of 10.0 KiB (20%)" in text
    rows = standings_table(shown).rows
    assert [row.head for row in rows] == ["h2o@64", "h2o@128"]
    assert [cell.text for cell in rows[0].cells] == [
        "within",
        "niah",
        "-1.2 %",
        "-3.0 to +0.5",
        "33",
    ]
    assert "2 of 33 samples failed" in text
    assert "Verdict" not in page(document())
