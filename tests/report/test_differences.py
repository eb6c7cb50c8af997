"""Variants against each other in words, on a terminal and on a page."""

from kvtool.documents.verdict import Difference
from kvtool.report.results_text import results_tables
from kvtool.report.words import differences_table
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
    for found, *said in [
        (difference(0.25, 0.125, 0.5), "+0.250", "[+0.125, +0.500]", "better"),
        (difference(-0.25, -0.5, -0.125), "-0.250", "[-0.500, -0.125]", "worse"),
        (difference(0.25, 0.125, 0.5, lower_is_better=True), "+0.250", "[+0.125, +0.500]", "worse"),
        (
            *(difference(0.125, -0.25, 0.5, deciding=900), "+0.125", "[-0.250, +0.500]"),
            "within the noise, about 900 samples would decide",
        ),
        (difference(0.0, -0.25, 0.25), "0", "[-0.250, +0.250]", "within the noise"),
        (difference(0.0, 0.0, 0.0), "0", "[0, 0]", "no sample differs, up to 5.8% could, unseen"),
        (difference(0.5, None, None), "+0.500", "–", "no interval: fewer than 6 samples"),
    ]:
        [row] = differences_table(document(("niah",), differences=[found])).rows
        number, interval, n, words = (cell.text for cell in row.cells[2:])
        assert [number, interval, words] == said
        assert n == "50"


def test_terminal_and_page_show_the_same():
    found = difference(0.125, -0.25, 0.5, deciding=900)
    run = document(("niah",), {"h2o": 1, "h2o+caote": 1}, (64,), differences=[found])
    [row] = differences_table(run).rows
    assert [cell.text for cell in row.cells] == [
        *("niah", "h2o@64", "+0.125", "[-0.250, +0.500]", "50"),
        "within the noise, about 900 samples would decide",
    ]
    text = printed(results_tables(run), 160)
    assert "differences on the same samples:" in text
    [line] = [line for line in text.splitlines() if "its base" in line]
    told = " ".join([row.head, *(cell.text for cell in row.cells)])
    assert line.replace(" its base", "").split() == told.split()


def test_a_terminal_shows_the_first_of_many():
    many = [difference(0.125, -0.25, 0.5, against=f"tova@{i}") for i in range(30)]
    text = printed(results_tables(document(("niah",), differences=many)), 160)
    assert "tova@23" in text
    assert "tova@24" not in text
    assert "and 6 more: see report.html" in text
