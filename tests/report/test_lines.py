"""Scores by budget and recorded curves."""

import math

import pytest

pytest.importorskip("matplotlib")

from kvtool.documents.verdict import Paired
from kvtool.report.curves import curve_figure, curves
from kvtool.report.panels import drawing
from kvtool.report.score_lines import budget_figure
from tests.report.examples import changed, container, document, line, ppl


def panels(figure):
    return {panel.get_title(): panel for panel in figure.axes if panel.axison}


def budgets(run):
    with drawing():
        return panels(budget_figure(run))


def curve(run, task, name):
    with drawing():
        return panels(curve_figure(run, task, name))


def test_a_point_is_a_budget_and_its_score():
    run = document(("niah",), {"h2o": 1, "tova": 1})
    panel = budgets(run)["niah"]
    by_policy = [container(panel, policy).lines[0] for policy in ("h2o", "tova")]
    for policy, points in zip(("h2o", "tova"), by_policy, strict=True):
        assert list(points.get_xdata()) == pytest.approx([64, 128, 256], rel=0.04)
        expected = [run.of(f"{policy}@{b}", "niah").value for b in (64, 128, 256)]
        assert list(points.get_ydata()) == expected
    beside = [b / a for a, b in zip(*(p.get_xdata() for p in by_policy), strict=True)]
    assert beside == pytest.approx([1.07] * 3)  # no whisker is on another


def test_policies_whose_budget_is_read_are_dashed_and_say_so():
    run = document(("niah",), {"h2o": 1, "quest": 1})
    reading = [
        variant.model_copy(update={"reads": variant.policy == "quest"}) for variant in run.variants
    ]
    panel = budgets(run.model_copy(update={"variants": reading}))["niah"]
    assert container(panel, "h2o").lines[0].get_linestyle() == "-"
    assert container(panel, "quest (budget is read)").lines[0].get_linestyle() == "--"


def test_scores_fed_in_blocks_have_hollow_markers():
    run = document(("ppl",), {"h2o": 1, "snapkv": 1})
    results = [ppl(variant, in_blocks=("snapkv",)) for variant in run.variants]
    panel = budgets(run.model_copy(update={"results": results}))["ppl"]
    faces = {p: container(panel, p).lines[0].get_markerfacecolor() for p in ("h2o", "snapkv")}
    assert faces["snapkv"] == "white" != faces["h2o"]
    assert any("does not compare" in x.get_label() for x in panel.get_lines())


def ends_of(run, task):
    [whiskers] = container(budgets(run)[task], "h2o").lines[2]
    return {x: sorted((low, high)) for (x, low), (x, high) in filter(len, whiskers.get_segments())}


def test_whiskers_without_the_full_cache_are_two_standard_errors():
    run = changed(document(("niah",), {"h2o": 1}), "h2o@128", stderr=0.125)
    run = changed(run, "h2o@256", stderr=None)
    ends = ends_of(run, "niah")
    first, second = (run.of(f"h2o@{budget}", "niah").value for budget in (64, 128))
    assert ends[64] == pytest.approx([first - 0.0392, first + 0.0392])
    assert ends[128] == pytest.approx([second - 0.245, second + 0.245])
    assert 256 not in ends


def test_whiskers_are_intervals_of_the_difference_upon_the_full_score():
    run = document(("niah",), {"h2o": 1})
    first = run.of("h2o@64", "niah").value
    pair = Paired(n=9, full=1.0, difference=first - 1, low=first - 1.1, high=0.1, speed=None)
    run = changed(run, "h2o@64", paired=pair)
    few = pair.model_copy(update={"low": None, "high": None})
    ends = ends_of(changed(run, "h2o@128", paired=few), "niah")
    assert ends[64] == pytest.approx([first - 0.1, 1.1])
    assert 128 not in ends


def test_the_full_cache_is_a_dotted_line_at_its_score():
    run = changed(document(("niah", "ppl"), {"h2o": 1}), "full", value=0.75)
    for panel in budgets(run).values():
        full = line(panel, "full")
        assert set(full.get_ydata()) == {0.75}
        assert list(full.get_xdata()) == [0, 1]  # all the way across
        assert full.get_linestyle() == ":"


def test_a_missing_score_is_a_gap_not_a_zero():
    run = changed(document(("niah",), {"h2o": 1}), "h2o@128", value=None, stderr=None)
    panel = budgets(run)["niah"]
    y = container(panel, "h2o").lines[0].get_ydata()
    assert math.isnan(y[1])
    assert not any(math.isnan(value) for value in (y[0], y[2]))
    assert panel.get_ylim()[0] > 0.1


def test_budgets_of_other_units_have_panels_of_their_own():
    run = document(("niah",), {"h2o": 1})
    spelled = {64: "10%", 128: "50%", 256: 256}
    variants = [a.model_copy(update={"budget": spelled.get(a.budget)}) for a in run.variants]
    run = run.model_copy(update={"variants": variants})
    with drawing():
        tokens, ratios = budget_figure(run).axes
    assert ratios.get_xlabel() == "budget (share of the prompt)"
    assert list(container(ratios, "h2o").lines[0].get_xdata()) == [0.1, 0.5]
    assert [t.get_text() for t in ratios.get_xticklabels()] == ["10%", "50%"]
    assert tokens.get_xlabel() == "policy, budget 256"


def test_curves_have_a_panel_per_budget_and_the_full_cache_in_each():
    run = renamed(document(("ppl",), {"h2o": 1, "tova": 1}))
    found = curve(run, "ppl", "curve")
    assert list(found) == ["ppl, budget 64", "ppl, budget 128", "ppl, budget 256"]
    for budget in (64, 128, 256):
        panel = found[f"ppl, budget {budget}"]
        assert panel.get_xscale() == "log"
        for label, variant in (("h2o", f"h2o@{budget}"), ("full", "full")):
            [entry] = run.of(variant, "ppl").curves
            assert list(line(panel, label).get_xdata()) == entry.x
            assert list(line(panel, label).get_ydata()) == entry.y
    assert line(found["ppl, budget 64"], "full").get_linestyle() == ":"


def renamed(run):
    """With a curve that is no likelihood, and so drawn as it is."""
    results = [
        r.model_copy(update={"curves": [r.curves[0].model_copy(update={"name": "curve"})]})
        for r in run.results
    ]
    return run.model_copy(update={"results": results})


def test_likelihoods_are_less_those_of_the_full_cache_from_the_budget_on():
    run = document(("ppl",), {"h2o": 1, "tova": 1})
    found = curve(run, "ppl", "nll by position")
    for budget in (64, 128, 256):
        drawn = line(found[f"ppl, budget {budget}"], "h2o")
        [ours] = run.of(f"h2o@{budget}", "ppl").curves
        [theirs] = run.of("full", "ppl").curves
        expected = {
            x: own - full
            for x, own, full in zip(ours.x, ours.y, theirs.y, strict=True)
            if x >= budget
        }
        assert list(drawn.get_xdata()) == list(expected)
        assert list(drawn.get_ydata()) == pytest.approx(list(expected.values()))
        full = line(found[f"ppl, budget {budget}"], "full")
        assert set(full.get_ydata()) == {0.0}
        assert full.get_xdata()[0] == 64
    assert found["ppl, budget 64"].get_ylabel() == "mean NLL, less full's"


def test_likelihoods_fed_in_other_blocks_than_to_the_full_cache_are_left_out():
    run = document(("ppl",), {"h2o": 1, "snapkv": 1})
    results = [ppl(variant, in_blocks=("snapkv",)) for variant in run.variants]
    run = run.model_copy(update={"results": results})
    drawn = curve(run, "ppl", "nll by position")
    for panel in drawn.values():
        labels = [x.get_label() for x in panel.get_lines() if len(x.get_xdata())]
        assert any(label.startswith("h2o") for label in labels)
        assert not any(label.startswith("snapkv") for label in labels)
        said = [x.get_label() for x in panel.get_lines() if not len(x.get_xdata())]
        assert said == ["not drawn: snapkv (fed in blocks)"]


def test_likelihoods_without_a_full_cache_are_as_they_are():
    run = document(("ppl",), {"h2o": 1}, (64,))
    run = run.model_copy(update={"variants": run.variants[1:], "results": run.results[1:]})
    drawn = line(curve(run, "ppl", "nll by position")["ppl"], "h2o@64")
    assert list(drawn.get_ydata()) == run.of("h2o@64", "ppl").curves[0].y


def test_cells_along_one_number_become_a_curve_with_gaps():
    run = document(("speed",), {"h2o": 1}, (64,))
    cells = run.of("full", "speed").cells
    holed = [cells[2], cells[0], cells[1].model_copy(update={"value": None})]
    run = changed(run, "full", cells=holed)
    [(task, entry)] = curves(run)
    assert (task, entry.name, entry.x) == ("speed", "score by length", [256, 512, 1024])
    y = line(curve(run, "speed", "score by length")["speed"], "full").get_ydata()
    assert (y[0], y[2]) == (cells[0].value, cells[2].value)
    assert math.isnan(y[1])


def test_cells_along_words_or_two_numbers_are_no_curve():
    assert curves(document(("niah",))) == []
    run = document(("speed",), {}, ())
    places = [{"type": "a"}, {"type": "b"}, {"type": "c"}]
    two = [{"length": 1, "batch": 1}, {"length": 2, "batch": 1}, {"length": 2, "batch": 2}]
    for at in (places, two, [{"length": 1}, {}, {}]):
        cells = [
            c.model_copy(update={"at": x}) for c, x in zip(run.results[0].cells, at, strict=True)
        ]
        assert curves(changed(run, "full", cells=cells)) == []
