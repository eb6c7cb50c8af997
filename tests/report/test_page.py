import re
import sys
from html.parser import HTMLParser

import pytest

from kvtool.evaluation.run.wrong import WrongAnswer
from kvtool.report.page import page, write_page
from tests.report.examples import document

VOID = {"meta", "br", "hr"}
SMALL = ({"h2o": 1, "tova": 1}, (64, 128))


class Reader(HTMLParser):
    """Reads a page, checks that elements are closed in order, and collects what it finds."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.references, self.rows = [], [], [], [], []
        self.words, self.links = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        given = dict(attributes)
        if "id" in given:
            self.ids.append(given["id"])
        self.links += [given[name] for name in ("href", "xlink:href", "src") if name in given]
        for value in given.values():
            self.references += re.findall(r"url\(#([^)]+)\)", value or "")
        self.references += re.findall("^#(.*)", given.get("href", ""))
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "svg" not in self.open and "style" not in self.open:
            self.words.append(data)
        if self.open and ({"th", "td"} & set(self.open)):
            self.rows[-1][-1] += data

    @property
    def text(self):
        return " ".join(self.words)


@pytest.fixture
def no_matplotlib(monkeypatch):
    monkeypatch.setattr("kvtool.extras.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_the_page_stands_alone(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.html"
    write_page(document(("ruler/vt", "ppl"), {"h2o": 1}, (64,)), path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    reader = Reader(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in reader.links)
    assert reader.tags.count("svg") == 5
    assert len(reader.ids) == len(set(reader.ids))
    assert reader.references
    assert set(reader.references) <= set(reader.ids)


def test_tables_hold_scores_differences_and_costs(no_matplotlib):
    run = document(("niah", "ruler/niah_multikey_1", "ruler/vt"), *SMALL)
    rows = [row for row in Reader(page(run)).rows if row[0] == "h2o@64"]
    scores, costs, niah, *_ = rows
    found = run.of("h2o@64", "niah")
    assert scores[1] == f"{found.value:.3f} ±{found.stderr:.3f} {found.delta:+.3f}"
    average = next(a for a in run.averages if a.variant == "h2o@64")
    assert scores[4] == f"{average.value:.1f} {average.delta:+.1f}"
    # held: 4 more slots than are filled, and the policy's 3 KiB
    expected = ["96.0 KiB 9.9%", "105.0 KiB 9.31x", "3.0 KiB", "0.300", "44.00 1.10x"]
    assert costs[1:] == [*expected, "8.0", "–"]  # then tokens written, and the share that evicted
    assert niah[2:4] == ["264", "0"]
    full = next(row for row in Reader(page(run)).rows if row[0] == "full")
    assert full[1] == "1.000 ±0.020"


def test_every_metric_of_a_task_is_told_and_missing_ones_are_no_zeros(no_matplotlib):
    reader = Reader(page(document(("fidelity",), *SMALL)))
    header = next(row for row in reader.rows if "failed" in row)
    assert header[1] == "fidelityagreement with full ↑"
    assert header[2:6] == ["KL divergence (nats)kl", "same answerexact_match", "n", "failed"]
    assert "divergence of the policy's next-token probabilities" in reader.text
    row = [row for row in reader.rows if row[0] == "h2o@64"][-1]
    assert row[2:6] == ["0.550 ±0.020", "–", "20", "0"]


def test_wrong_answers_stand_beside_their_references(no_matplotlib):
    wrong = [
        WrongAnswer("h2o@64", "length=512/3", None, " 12 <b> ", ("124",), 0.0, 1.0),
        WrongAnswer("tova@64", "a", 2, "x" * 500, ("y", "z"), 50.0, 100.0),
    ]
    run = document(("niah", "ppl"), *SMALL)
    rows = Reader(page(run, {"niah": wrong})).rows
    start = rows.index(["variant", "sample", "answer", "reference", "score"])
    assert rows[start + 1] == ["h2o@64", "length=512/3", "12 <b>", "124", "0.000"]
    assert rows[start + 2] == ["tova@64", "a, question 2", "x" * 240 + " …", "y or z", "50.0"]
    assert "Wrong answers" not in page(run)


def test_cells_are_told_where_they_are_few(no_matplotlib):
    run = document(("niah", "ruler/niah_multikey_1"), *SMALL)
    rows = Reader(page(run)).rows
    assert ["variant", "length 512", "length 1024"] in rows
    cells = run.of("tova@64", "ruler/niah_multikey_1").cells
    assert ["tova@64", *(f"{cell.value:.1f} ±4.0" for cell in cells)] in rows
    assert not any("depth" in header for row in rows for header in row)


def test_names_cannot_break_out_of_the_page():
    evil = "</style><script>alert(1)</script>&\"'"
    run = document(("ruler/vt",), {"h2o": 1}, (64,))
    run = run.model_copy(
        update={
            "name": evil,
            "argv": [evil],
            "model": run.model.model_copy(update={"id": evil}),
            "variants": [
                run.variants[0],
                run.variants[1].model_copy(update={"name": evil, "policy": evil}),
            ],
            "results": [
                r.model_copy(
                    update={
                        "task": evil,
                        "metric": evil,
                        "settings": {evil: evil},
                        "variant": "full" if r.variant == "full" else evil,
                    }
                )
                for r in run.results
            ],
        }
    )
    text = page(run)
    reader = Reader(text)
    assert "script" not in reader.tags
    assert "<script" not in text
    assert reader.tags.count("style") == 1
    assert evil in reader.text


def test_failures_and_missing_samples_are_at_the_top(no_matplotlib):
    run = document(("niah",), *SMALL)
    failed = [r.model_copy(update={"failed": 2}) for r in run.results[:1]]
    run = run.model_copy(
        update={"results": [*failed, *run.results[1:]], "complete": False, "gates": []}
    )
    text = page(run)
    header = text[text.index("<header>") : text.index("</header>")]
    assert "2 samples failed" in header
    assert "not complete" in header
    assert "gates" not in header
    assert "1 of 2 gates are not met" in Reader(page(document(("niah",), *SMALL))).text


def test_without_matplotlib_there_are_tables_and_a_word_on_pictures(no_matplotlib, tmp_path):
    write_page(document(("niah",), *SMALL), tmp_path / "report.html")
    reader = Reader((tmp_path / "report.html").read_text())
    assert "svg" not in reader.tags
    assert "pip install 'kvtool[plots]'" in reader.text
    assert any(row[0] == "tova@128" for row in reader.rows)


def test_a_run_without_results_still_has_a_page(no_matplotlib):
    run = document((), {}).model_copy(update={"gates": [], "averages": []})
    assert "nothing was measured" in Reader(page(run)).text
