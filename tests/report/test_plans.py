import pytest
from rich.console import Console

from kvtool.documents.plan import Target
from kvtool.planning.make_plan import make_plan
from kvtool.policies.allocate.d2o import D2O
from kvtool.policies.allocate.uniform import Uniform
from kvtool.policies.grammar import parse_policy
from kvtool.report.panels import drawing
from kvtool.report.plans import bar, plan_figure, plan_table
from tests.planning.documents import FULL, LINEAR, SLIDING, profile, shape


def d2o_plan(**target):
    target = Target(**({"context": 1000} | (target or {"ratio": 0.2})))
    return make_plan(shape(), D2O(), target, profile=profile()).document


def mixed_plan():
    model = shape(FULL, SLIDING, LINEAR)
    return make_plan(model, Uniform(), Target(bytes=10**6, context=4000, batch=4)).document


def shown(plan, width=100):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(plan_table(plan))
    return capture.get()


def test_every_layer_has_its_tokens_and_a_bar_in_proportion():
    lines = shown(d2o_plan()).splitlines()
    head = " ".join(" ".join(lines[:2]).split())
    assert "d2o: 20% for prompts of 1,000 tokens: 200.0 KiB, 20% of a full cache, stored" in head
    # 804 slots of 256 bytes and 2 positions: each of 4 layers has one to spare
    assert "with positions 207.3 KiB, and a token reads 201.0 KiB" in head
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert [row[:3] for row in rows] == [
        ["0", "243", "24%"],
        ["1", "243", "24%"],
        ["2", "180", "18%"],
        ["3", "134", "13%"],
    ]
    assert [row[3] for row in rows] == [bar(1), bar(1), bar(180 / 243), bar(134 / 243)]


def test_equal_layers_share_a_line_and_a_bar():
    """Layers 0 to 29 of one budget, then two sliding ones, which are too few to share a line."""
    kinds = [FULL] * 30 + [SLIDING] * 2
    plan = make_plan(shape(*kinds), Uniform(), Target(tokens=256, context=1000)).document
    rows = [line.split() for line in shown(plan).splitlines() if line.strip()[:1].isdigit()]
    assert rows[0] == ["0-29", "256", "26%", bar(1)]
    assert [row[0] for row in rows] == ["0-29", "30", "31"]
    assert plan.to_data()["layers"]["tokens"][:30] == [256] * 30
    pytest.importorskip("matplotlib")
    with drawing():
        (axes,) = plan_figure(plan).axes
    wide, *narrow = axes.patches
    assert (wide.get_x(), wide.get_width()) == pytest.approx((-0.4, 29.8))
    assert [patch.get_width() for patch in narrow] == pytest.approx([0.8, 0.8])


def stages(policy, **target):
    policy = None if policy is None else parse_policy(policy)
    target = Target(context=1000, **target)
    return make_plan(shape(), D2O(), target, profile=profile(), policy=policy).document


def test_rocketkv_is_told_of_under_its_own_policies_only():
    for policy in (None, "h2o", "quest"):
        plan = stages(policy, tokens=64)
        assert plan.rocketkv is not None
        assert "rocketkv" not in shown(plan)


def test_bars_are_of_what_the_policy_stores():
    policy = parse_policy("rocketkv")
    plan = make_plan(
        shape(), D2O(), Target(tokens=64, context=1000), profile=profile(), policy=policy
    ).document
    rows = [line.split() for line in shown(plan).splitlines() if line.strip()[:1].isdigit()]
    stored = [int(row[1].replace(",", "")) for row in rows]
    assert sum(stored) == 4 * plan.rocketkv.stage1_tokens
    assert stored[0] > stored[3] > plan.layers.tokens[0]
    text = " ".join(shown(plan).split())
    assert "rocketkv, d2o: 64 tokens per layer for prompts of 1,000 tokens: holds" in text
    assert "of a full cache; a token reads" in text


def test_layers_that_are_not_planned_are_named():
    text = shown(mixed_plan())
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert rows[1][:3] == ["1", "63", "sliding"]
    assert rows[2][:3] == ["2", "0", "linear"]
    assert "uniform: 976.6 KiB for prompts of 4,000 tokens x 4 rows" in text


def test_the_picture_has_a_bar_per_layer_and_the_mean_of_the_planned_ones():
    pytest.importorskip("matplotlib")
    with drawing():
        (axes,) = plan_figure(mixed_plan()).axes
    plan = mixed_plan()
    assert [patch.get_height() for patch in axes.patches] == plan.layers.tokens
    assert set(axes.lines[0].get_ydata()) == {plan.layers.tokens[0]}
    colours = [patch.get_facecolor() for patch in axes.patches]
    assert colours[0] != colours[1] == colours[2]
