"""Variants against each other in words, on a terminal and on a page."""

from kvtool.documents.verdict import Difference
from kvtool.report.results_text import results_tables
from kvtool.report.words import differences_in_words, differences_table, said
from tests.report.examples import document
from tests.report.test_tables import printed


def difference(value, low, high, **changes):
    fields = {
        "task": "niah",
        "variant": "h2o+caote@64",
        "against": "h2o@64",
        "because": "base",
        "n": 50,
        "difference": value,
        "low": low,
        "high": high,
        "lower_is_better": False,
        "deciding": None,
    }
    return Difference(**(fields | changes))


def test_a_difference_says_what_its_interval_allows():
    for found, words in [
        (difference(0.25, 0.125, 0.5), "+0.250 [+0.125, +0.500]: better (n=50)"),
        (difference(-0.25, -0.5, -0.125), "-0.250 [-0.500, -0.125]: worse (n=50)"),
        (
            difference(0.25, 0.125, 0.5, lower_is_better=True),
            "+0.250 [+0.125, +0.500]: worse (n=50)",
        ),
        (
            difference(0.125, -0.25, 0.5, deciding=900),
            "+0.125 [-0.250, +0.500]: within the noise, about 900 samples would decide (n=50)",
        ),
        (
            difference(0.0, -0.25, 0.25),
            "0 [-0.250, +0.250]: within the noise (n=50)",
        ),
        (
            difference(0.0, 0.0, 0.0),
            "0 [0, 0]: no sample differs, up to 5.8% could, unseen (n=50)",
        ),
        (
            difference(0.5, None, None, n=5),
            "+0.500, no interval: fewer than 6 samples (n=5)",
        ),
    ]:
        assert said(found, 1.0) == words


def test_terminal_and_page_tell_the_same():
    found = difference(0.125, -0.25, 0.5, deciding=900)
    run = document(("niah",), {"h2o": 1, "h2o+caote": 1}, (64,), differences=[found])
    assert differences_in_words(run) == [("niah", "h2o+caote@64 - h2o@64", said(found, 1.0))]
    text = printed(results_tables(run), 160)
    assert "differences on the same samples:" in text
    assert said(found, 1.0) in text
    [row] = differences_table(run).rows
    assert [cell.text for cell in row.cells] == [
        *("niah", "h2o@64", "its base", "+0.125", "[-0.250, +0.500]", "50"),
        "within the noise, about 900 samples would decide",
    ]


def test_a_terminal_shows_the_first_of_many():
    many = [difference(0.125, -0.25, 0.5, against=f"tova@{i}") for i in range(30)]
    text = printed(results_tables(document(("niah",), differences=many)), 160)
    assert "tova@23" in text
    assert "tova@24" not in text
    assert "and 6 more: see report.html" in text
