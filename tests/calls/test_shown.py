"""Documents shown: as the terminal's text, as data frames, as tables in a notebook."""

import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import pandas
import pytest

import kvtool

QUICK = {"tasks": "niah", "lengths": [96], "depths": [100], "samples": 1}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """One document of each kind."""
    folder = tmp_path_factory.mktemp("shown") / "run"
    profile = kvtool.profile(samples=1, tokens=64, metrics="entropy,memory")
    return SimpleNamespace(
        folder=folder,
        profile=profile,
        memory=kvtool.profile(metrics="memory"),
        plan=kvtool.plan(profile, ratio=0.25, policy="h2o", allocator="pyramid"),
        generation=kvtool.generate(None, "The old lamp <b>", "h2o", 32, max_new_tokens=3),
        talk=kvtool.generate(turns=["A lamp", "A school"], max_new_tokens=2),
        results=kvtool.evaluate(None, folder, policies=["tova"], budgets=[24], **QUICK),
    )


def test_a_table_is_what_the_terminal_shows(documents, tmp_path, monkeypatch, capsys):
    from kvtool.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "90")
    (tmp_path / "profile.json").write_text(documents.profile.to_json())
    flags = ["--ratio", "25%", "-p", "h2o", "--allocator", "pyramid", "-f", "text", "-q"]
    assert main(["plan-budget", "profile.json", *flags]) == 0
    assert capsys.readouterr().out == documents.plan.table()
    flags = ["--samples", "1", "--tokens", "64", "--metrics", "entropy,memory", "-f", "text"]
    assert main(["profile", *flags, "-q"]) == 0
    assert capsys.readouterr().out == documents.profile.table()
    assert main(["eval", "--rescore", str(documents.folder), "--no-plots", "-f", "text"]) == 0
    called = documents.results.table(width=90)
    assert capsys.readouterr().out == called
    assert "tova@24" in called
    assert documents.generation.text in documents.generation.table()
    assert documents.generation.cache.in_words() in documents.generation.table(width=200)


def test_data_frames_hold_a_row_for_each_layer_result_and_answer(documents):
    plan = documents.plan.to_pandas()
    assert list(plan["tokens"]) == documents.plan.layers.tokens
    assert list(plan["layer"]) == [0, 1, 2, 3]
    profile = documents.profile.to_pandas()
    assert list(profile["column-sum entropy"]) == documents.profile.metrics.entropy
    memory, table = documents.memory.to_pandas(), documents.memory.metrics.memory
    assert list(memory["bytes"]) == [size for row in table.bytes for size in row]
    answers = documents.talk.to_pandas()
    assert list(answers["user"]) == ["A lamp", "A school"]
    assert list(answers["text"]) == [turn.text for turn in documents.talk.turns]
    (row,) = documents.generation.to_pandas().to_dict("records")
    assert (row["new_tokens"], row["kv_bytes"]) == (3, documents.generation.cache.kv_bytes)
    results = documents.results.to_pandas()
    assert isinstance(results, pandas.DataFrame)
    for row in results.to_dict("records"):
        measured = documents.results.of(row["variant"], row["task"])
        assert (row["value"], row["n"]) == (measured.value, measured.n)
        assert row["kv_bytes"] == measured.cost.kv_bytes
    assert list(results["budget"].dropna()) == [24]


class Tables(HTMLParser):
    """Collects the cells of all tables, and complains of tags that are not closed."""

    def __init__(self, text):
        super().__init__()
        self.cells, self._open = [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        if tag != "br":
            self._open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "td" in self._open or "th" in self._open:
            self.cells[-1] += data


def test_a_notebook_shows_tables(documents):
    cells = {}
    for name in ("profile", "memory", "plan", "generation", "talk", "results"):
        text = getattr(documents, name)._repr_html_()
        assert "<table>" in text
        cells[name] = Tables(text).cells
        assert len(cells[name]) > 8
    assert str(documents.plan.layers.tokens[0]) in cells["plan"]
    assert documents.talk.turns[1].text in cells["talk"]
    assert "tova@24" in cells["results"]


def test_markup_in_a_text_is_text(documents):
    said = documents.generation.model_copy(update={"text": "<script>&"})
    text = said._repr_html_()
    assert "<script>" not in text
    assert "<script>&" in Tables(text).cells
    assert "<script>&" in said.table()
    odd = documents.generation.model_copy(update={"text": "[bold]no markup[/bold]"})
    assert "[bold]no markup[/bold]" in odd.table()


def test_without_pandas_one_line_says_so(documents, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setattr("kvtool.report.view.find_spec", lambda name: None)
    with pytest.raises(kvtool.UsageError, match="to_pandas needs pandas; pip install pandas"):
        documents.plan.to_pandas()
    assert documents.plan.table()
