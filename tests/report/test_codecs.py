"""Variants that differ in the bits of what they store: their looks, pictures, tables and verdict.

Of 16 channels, 18 bytes are stored by int8 and fp8, 10 by int4 and 64 in float32.
"""

import io

import pytest
from rich.console import Console

pytest.importorskip("matplotlib")


from kvtool.documents.verdict import Paired
from kvtool.evaluation.verdict import make_verdict
from kvtool.report.panels import covered, drawing, looks
from kvtool.report.results import costs
from kvtool.report.results_text import summary_table
from kvtool.report.score_lines import front_of, held_figure, held_points
from kvtool.report.table import Note
from kvtool.report.variants import families
from kvtool.report.view import rows_of
from kvtool.report.words import notes
from tests.report.examples import BITS, changed, container, document, line

RUN = document(("niah",), BITS)


def panel_of(figure, run=RUN):
    with drawing():
        return next(panel for panel in figure(run).axes if panel.get_title() == "niah")


def test_variants_of_one_base_differ_in_their_codec():
    run = document(("niah",), ("h2o+int8", "h2o+caote+int4(rotate=false)", "h2o", "full+int8"))
    found = {family.label: (family.base, family.codec) for family in families(run)}
    assert found == {
        "full": ("full", None),
        "full+int8": ("full", "int8"),
        "h2o+int8": ("h2o", "int8"),
        "h2o+caote+int4(rotate=false)": ("h2o+caote", "int4(rotate=false)"),
        "h2o": ("h2o", None),
    }
    assert [family.is_full for family in families(run)] == [True, False, False, False, False]


def test_a_base_has_one_colour_and_a_codec_one_marker():
    look = looks(RUN)
    colours = {base: {look[f"{base}{c}"].colour for c in ("", "+int8", "+int4")} for base in BASES}
    assert [len(found) for found in colours.values()] == [1, 1]
    assert look["full+int8"].colour == "black"
    assert len({*colours["h2o"], *colours["snapkv"], "black"}) == 3
    for codec in ("", "+int8", "+int4"):
        assert len({look[f"{base}{codec}"].marker for base in BASES}) == 1
    assert look["full+int8"].marker == look["h2o+int8"].marker
    assert len(set(looks(RUN).values())) == len(look), "two variants look alike"


BASES = ("h2o", "snapkv")


def test_points_stand_at_the_bytes_of_their_codes():
    panel = panel_of(held_figure)
    for family in ("h2o", "h2o+int8", "h2o+int4"):
        places = container(panel, family).lines[0].get_xdata()
        held = [RUN.of(f"{family}@{budget}", "niah").cost.held_bytes for budget in (64, 128, 256)]
        assert list(places) == pytest.approx(held, rel=0.12)  # nearly equal ones are drawn apart
    whole = container(panel, "full+int8").lines[0]
    assert list(whole.get_xdata()) == pytest.approx(
        [RUN.of("full+int8", "niah").cost.held_bytes], rel=0.12
    )
    assert whole.get_color() == "black"
    assert line(panel, "full").get_linestyle() == ":"
    shares = [
        RUN.of(f"{name}@64", "niah").cost.kv_bytes / (64 * 24) for name in ("h2o", *BITS[1:3])
    ]
    assert shares == [64, 18, 10], "the example is what the picture is tested with"


def test_the_front_holds_more_tokens_in_fewer_bits():
    """Equal scores at equal budgets: only the fewest bits are on it, and the full cache in 8."""
    front = [
        point.variant.name for point in front_of(held_points(RUN, "niah"), lower_is_better=False)
    ]
    assert front == ["snapkv+int4@64", "snapkv+int4@128", "snapkv+int4@256", "full+int8"]


def test_a_line_of_the_same_colour_covers_nothing():
    flat = {1: 0.5, 2: 0.5}
    assert covered([flat, flat, flat], ["blue", "blue", "red"]) == [{(1, 2): 1}, {(1, 2): 1}, {}]
    two = covered([flat, flat, flat], ["blue", "red", "red"])
    assert two == [{(1, 2): 1}, {}, {}], "one colour shows on both sides, however many its lines"
    assert covered([flat, flat, flat]) == [{(1, 2): 2}, {(1, 2): 1}, {}]


def test_tables_say_how_many_times_smaller_a_cache_is():
    """At 256 of 648 tokens; 4 more slots and 48 bytes of state a slot are held."""
    whole, held = 652 * 24 * 64, 260 * 24 * 18 + 48 * 256
    text = io.StringIO()
    Console(file=text, width=120).print(summary_table(RUN))
    row = next(row for row in text.getvalue().splitlines() if "h2o+int8@256" in row)
    assert f" {whole / held:.2f}x " in row
    smaller = {row.head: row.cells[1].notes for row in costs(RUN).rows}
    assert smaller["h2o+int8@256"] == (Note(f"{whole / held:.2f}x"),)
    assert smaller["full"] == (Note("1.00x"),)
    assert any("held: their buffers" in note for note in notes(RUN))
    partial = RUN.model_copy(update={"results": RUN.results[1:]})
    smaller = {row.head: row.cells[1].notes for row in costs(partial).rows}
    assert smaller["h2o+int8@256"] == (), "there is no full cache to hold it against"


def test_the_verdict_names_the_fewest_bytes_whatever_the_tokens():
    """h2o+int4@128 holds more tokens than h2o@64 and fewer bytes."""
    pair = Paired(n=20, full=1.0, difference=0.0, low=-0.01, high=0.01, speed=None)
    lost = pair.model_copy(update={"difference": -0.5, "low": -0.6, "high": -0.4})
    run = RUN
    for variant in RUN.variants[1:]:
        near = variant.name in ("h2o@64", "h2o@256", "h2o+int4@128", "full+int8")
        run = changed(run, variant.name, paired=pair if near else lost)
    choice = make_verdict(run.results, run.variants, 5).choices[0]
    assert (choice.by, choice.variant) == ("bytes", "h2o+int4@128")
    assert choice.cost == 132 * 24 * 10 + 48 * 128
    assert choice.full == 652 * 24 * 64
    run = changed(changed(run, "h2o+int4@128", paired=lost), "h2o@64", paired=lost)
    choice = make_verdict(run.results, run.variants, 5).choices[0]
    assert choice.variant == "full+int8", "it holds fewer bytes than h2o@256"


def test_rows_of_a_data_frame_name_the_codec():
    codecs = {row["variant"]: row["codec"] for row in rows_of(RUN)}
    assert codecs["h2o+int4@64"] == "int4"
    assert codecs["h2o@64"] is None
