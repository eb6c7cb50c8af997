import re

import pytest
from rich.console import Console

from kvtool.documents.verdict import Paired
from kvtool.evaluation.run.collect import with_deltas
from kvtool.report.results_text import needle_tables, summary_table
from tests.report.examples import DEPTHS, LENGTHS, changed, document, ppl, with_host_memory

THREE = ("niah", "ruler/niah_multikey_1", "fidelity")


def printed(renderable, width, colour=False):
    console = Console(
        width=width,
        record=True,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        no_color=not colour,
        file=open("/dev/null", "w"),  # noqa: SIM115
    )
    console.print(renderable)
    return console.export_text(styles=colour)


def rows(text, variant):
    return [line.split() for line in text.splitlines() if line.split()[:1] == [variant]]


@pytest.mark.parametrize(("width", "tables"), [(80, 3), (200, 1)])
def test_rows_hold_scores_differences_and_costs_in_as_many_tables_as_fit(width, tables):
    run = document(THREE)
    text = printed(summary_table(run), width)
    assert len(rows(text, "h2o@64")) == tables
    cells = [cell for row in rows(text, "h2o@64") for cell in row]
    for task, digits in (("niah", 3), ("ruler/niah_multikey_1", 1), ("fidelity", 3)):
        found = run.of("h2o@64", task)
        at = cells.index(f"{found.value:.{digits}f}±{found.stderr:.{digits}f}")
        assert cells[at + 1] == f"{found.delta:+.{digits}f}"
        assert found.delta < 0
    # 64 slots of 2 x 6 layers x 2 heads x 16 x 4 bytes; 648 tokens in the full cache
    # 4 more slots and 48 bytes a slot are held: 652 of 1536 bytes against 68 of them and 64 x 48
    costs = ["96.0", "KiB", "9.9%", "105.0", "KiB", "9.31x", "0.300", "44.00", "1.10x"]
    found = [cell for cell in cells if cell != "h2o@64"]  # which each table begins with
    assert found[-11:] == [*costs, "8.0", "–"]  # then tokens written, and the share that evicted
    assert f"{652 * 1536 / (68 * 1536 + 64 * 48):.2f}" == "9.31"
    full = [cell for row in rows(text, "full") for cell in row]
    assert "1.000±0.020" in full
    assert not any(cell.startswith(("+", "-")) or cell == "0" for cell in full[1:4])


def test_intervals_take_the_place_of_standard_errors():
    run = document(("niah",), {"h2o": 1}, (64,))
    found = run.of("h2o@64", "niah")
    pair = Paired(n=9, full=1.0, difference=found.delta, low=-0.75, high=-0.5, speed=None)
    sure = changed(run, "h2o@64", paired=pair)
    text = printed(summary_table(sure), 200, colour=True)
    assert f"{found.value:.3f} \x1b[31m{found.delta:.3f}\x1b[0m [-0.750, -0.500]" in text
    noisy = changed(run, "h2o@64", paired=pair.model_copy(update={"high": 0.0}))
    text = printed(summary_table(noisy), 200, colour=True)
    assert f"{found.value:.3f} {found.delta:.3f} [-0.750, 0]" in text


def test_colour_follows_the_better_direction_and_the_sign_the_number():
    run = document(("ppl", "speed"), {"h2o": 1}, (64,))
    text = printed(summary_table(run), 200, colour=True)
    delta = run.of("h2o@64", "ppl").delta
    assert delta > 0
    assert f"\x1b[31m+{delta:.3f}" in text  # a higher perplexity is red
    assert "\x1b[32m+4.000" in text  # more tokens per second are green
    plain = printed(summary_table(run), 200)
    assert f"+{delta:.3f}" in plain
    assert "\x1b" not in plain


def test_what_does_not_compare_with_the_full_cache_is_left_blank():
    run = document(("ppl",), {"h2o": 1, "snapkv": 1}, (64,))
    results = with_deltas([ppl(variant, in_blocks=("snapkv",)) for variant in run.variants])
    run = run.model_copy(update={"results": results})
    text = printed(summary_table(run), 200, colour=True)
    cells = rows(printed(summary_table(run), 200), "snapkv@64")[0]
    assert cells[1] == f"{run.of('snapkv@64', 'ppl').value:.3f}"
    assert not cells[2].startswith(("+", "-"))
    assert f"\x1b[31m+{run.of('h2o@64', 'ppl').delta:.3f}" in text
    assert "their differences are left blank" in text


def test_failed_samples_and_missing_results_are_marked():
    run = document(("niah",), {"h2o": 1}, (64, 128))
    broken = [
        r.model_copy(update={"failed": 3}) if r.variant == "h2o@64" else r for r in run.results
    ]
    run = run.model_copy(update={"results": broken[:-1], "complete": False})
    text = printed(summary_table(run), 120)
    assert "!3" in rows(text, "h2o@64")[0]
    assert rows(text, "h2o@128")[0] == ["h2o@128", *["–"] * 7]
    assert "3 in all" in text
    assert "not complete" in text
    assert "!k" not in printed(summary_table(document(("niah",))), 120)


def test_means_stand_beside_their_suite():
    run = document(("niah", "ruler/niah_multikey_1", "ruler/vt"))
    text = printed(summary_table(run), 200)
    assert "mean of 2" in text
    average = next(a for a in run.averages if a.variant == "roco@64")
    assert f"{average.value:.1f}" in rows(text, "roco@64")[0]
    assert f"{average.delta:+.1f}" in rows(text, "roco@64")[0]


def test_gates_say_passed_or_failed():
    text = printed(summary_table(document(("niah",))), 80)
    assert re.search(r"score +roco@64 +niah +0\.550 +0\.900 +FAILED", text)
    assert re.search(r"drop below full \(%\) +snapkv@256 +niah +0\.000 +2\.000 +passed", text)


def test_the_notes_tell_metrics_samples_and_queries():
    text = printed(summary_table(document(("niah", "ruler/vt"))), 200)
    assert "em: exact match, share of answers that hold what was asked for" in text
    assert "samples: niah 264, ruler/vt 20" in text
    assert "(query-aware): niah\n" in text
    assert "(query-agnostic): ruler/vt\n" in text


def test_the_notes_tell_what_lies_in_host_memory():
    run = document(("niah",), {"h2o": 1, "snapkv": 1}, (64,))
    text = printed(summary_table(with_host_memory(run, "h2o@64")), 200)
    assert "evicted tokens in host memory, beside what is held: h2o@64 512.0 KiB" in text
    assert "host memory" not in printed(summary_table(run), 200)


def test_names_are_not_read_as_markup():
    run = document(("niah",), {"h2o": 1}, (64,))
    odd = [r.model_copy(update={"task": "lm-eval/[red]x[/red]"}) for r in run.results]
    run = run.model_copy(update={"results": odd})
    assert "[red]x[/red]" in printed(summary_table(run), 120)
    assert "[red]x[/red]" in printed(needle_tables(run), 120)


def test_the_needle_table_has_depth_0_on_top_and_lengths_ascending():
    run = document(("niah",), {"h2o": 1}, (64,))
    lines = printed(needle_tables(run), 45).splitlines()
    start = next(i for i, line in enumerate(lines) if "h2o@64" in line) + 2
    assert lines[start - 1].split() == ["niah", f"{run.of('h2o@64', 'niah').value:.3f}"]
    assert lines[start].split() == ["depth", *map(str, LENGTHS)]
    cells = {(c.at["depth"], c.at["length"]): c.value for c in run.of("h2o@64", "niah").cells}
    for line, depth in zip(lines[start + 1 :], DEPTHS, strict=False):
        expected = [f"{depth}%", *(f"{cells[depth, length]:.2f}" for length in LENGTHS)]
        assert line.split() == expected
