"""Scores against bytes held, and the front of those that no other beats."""

import itertools
import random

import pytest

pytest.importorskip("matplotlib")

from kvtool.report.panels import covered, dodge, drawing, pareto_front
from kvtool.report.score_lines import front_of, held_figure, held_points, held_tasks
from tests.report.examples import changed, container, document, line, ppl


def panel_of(run, task):
    with drawing():
        figure = held_figure(run)
    return next(panel for panel in figure.axes if panel.get_title() == task)


def test_points_stand_at_buffers_and_policy_state():
    run = document(("niah",), {"h2o": 1})
    panel = panel_of(run, "niah")
    drawn = container(panel, "h2o").lines[0]
    costs = [run.of(f"h2o@{budget}", "niah").cost for budget in (64, 128, 256)]
    assert all(cost.allocated_bytes > cost.kv_bytes for cost in costs)
    held = [cost.allocated_bytes + cost.state_bytes for cost in costs]
    assert list(drawn.get_xdata()) == pytest.approx(held)
    assert list(drawn.get_ydata()) == [run.of(f"h2o@{b}", "niah").value for b in (64, 128, 256)]
    assert panel.get_xscale() == "log"
    assert panel.get_xlabel() == "bytes held: buffers and policy state"
    labels = [tick.get_text() for tick in panel.get_xticklabels()]
    assert labels[0] == "128\nKiB"
    assert 2 <= len(labels) <= 5
    assert line(panel, "full").get_linestyle() == ":"
    assert set(line(panel, "full").get_ydata()) == {1.0}


def test_runs_that_did_not_record_buffers_say_so():
    run = document(("niah",), {"h2o": 1}, (64,))
    old = run.of("h2o@64", "niah").cost.model_copy(update={"allocated_bytes": None})
    run = changed(run, "h2o@64", cost=old)
    panel = panel_of(run, "niah")
    assert panel.get_xlabel() == "bytes held: filled slots and policy state"
    assert container(panel, "h2o").lines[0].get_xdata()[0] == old.kv_bytes + old.state_bytes


def test_the_front_is_drawn_through_the_points_that_no_other_beats():
    run = document(("niah",), {"h2o": 1, "roco": 1})
    points = held_points(run, "niah")
    front = front_of(points, lower_is_better=False)
    assert [point.variant.name for point in front] == ["roco@64", "roco@128", "roco@256", "full"]
    [drawn] = [x for x in panel_of(run, "niah").get_lines() if x.get_label() == "Pareto front"]
    assert drawn.get_drawstyle() == "steps-post"
    assert list(drawn.get_ydata()) == [point.value for point in front]


def test_what_was_fed_in_blocks_is_hollow_and_not_on_the_front():
    run = document(("ppl",), {"h2o": 1, "snapkv": 1}, (64,))
    run = run.model_copy(
        update={"results": [ppl(variant, in_blocks=("snapkv",)) for variant in run.variants]}
    )
    run = changed(run, "snapkv@64", value=0.001)  # better than all others
    front = front_of(held_points(run, "ppl"), lower_is_better=True)
    assert {point.variant.name for point in front} == {"h2o@64", "full"}
    panel = panel_of(run, "ppl")
    assert container(panel, "snapkv").lines[0].get_markerfacecolor() == "white"
    assert container(panel, "h2o").lines[0].get_markerfacecolor() != "white"


def test_there_is_a_panel_for_each_task_that_was_measured_under_a_budget():
    run = document(("niah", "ppl"), {"h2o": 1}, (64,))
    assert held_tasks(run) == ["niah", "ppl"]
    assert held_tasks(changed(run, "h2o@64", cost=None)) == []
    assert held_tasks(document(("niah",), {})) == []


@pytest.mark.parametrize("lower_is_better", [False, True])
def test_the_front_is_what_a_loop_over_all_pairs_finds(lower_is_better):
    rng = random.Random(0)
    for _ in range(20):
        points = [(rng.randrange(6), rng.randrange(6)) for _ in range(12)]
        expected = set()
        for i, (cost, score) in enumerate(points):
            beaten = False
            for other_cost, other in points:
                better = other < score if lower_is_better else other > score
                as_good = better or other == score
                beaten |= other_cost <= cost and as_good and (other_cost < cost or better)
            if not beaten:
                expected.add(i)
        found = pareto_front(points, lower_is_better=lower_is_better)
        assert set(found) == expected
        assert [points[i][0] for i in found] == sorted(points[i][0] for i in expected)


def test_points_are_moved_only_where_they_are_near():
    assert dodge([], near=1.1, step=1.2) == []
    moved = dodge([100.0, 1000.0, 105.0, 100.0], near=1.1, step=1.2)
    assert moved[1] == 1000.0
    group = [moved[0], moved[3], moved[2]]  # equal ones in the order given, then the larger
    assert [b / a for a, b in itertools.pairwise(group)] == pytest.approx([1.2, 1.2])
    assert group[1] == pytest.approx((100 * 105) ** 0.5)


def test_covered_pieces_are_those_of_two_equal_ends():
    flat, late = {1: 0.5, 2: 0.5, 4: 0.5}, {1: 0.0, 2: 0.5, 4: 0.5}
    gap = {1: 0.5, 2: None, 4: 0.5}
    assert covered([flat, late, flat, gap]) == [{(1, 2): 1, (2, 4): 2}, {(2, 4): 1}, {}, {}]
    assert covered([]) == []
