"""Results are read back from a run's folder, and compare policies that the user chooses."""

from __future__ import annotations

import pytest

import kvtool


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "mine"
    results = kvtool.evaluate(
        folder=folder,
        tasks="niah",
        policies=["streaming", "h2o"],
        budgets=[32, 4096],
        lengths=96,
        depths=2,
        samples=3,
        compare="h2o,streaming",
    )
    return folder, results


def test_they_are_what_the_run_returned(run):
    folder, results = run
    for path in (folder, str(folder), folder / "results.json"):
        assert kvtool.load_results(path).to_data() == results.to_data()
    assert "compared as asked" in kvtool.load_results(folder).table()


def test_pairs_that_were_asked_for_come_first_and_are_corrected(run):
    _, results = run
    asked = [each for each in results.differences if each.asked]
    assert results.differences[: len(asked)] == asked
    assert [(each.variant, each.against) for each in asked] == [
        ("h2o@32", "streaming@32"),
        ("h2o@4096", "streaming@4096"),
    ]
    assert asked == results.compare("h2o", "streaming")
    assert asked[1].p_holm == 1.0


def test_tokens_written_and_evictions_are_counted(run):
    """A budget of 32 evicts in every sample of 96 tokens, one of 4096 in none."""
    _, results = run
    shares = {each.variant: each.cost.evicted_share for each in results.results}
    assert shares == {
        "full": 0.0,
        "streaming@32": 1.0,
        "streaming@4096": 0.0,
        "h2o@32": 1.0,
        "h2o@4096": 0.0,
    }
    assert all(each.cost.new_tokens > 0 for each in results.results)
    table = results.table(form="markdown")
    assert "not a test of compression" in table
    (row,) = [line for line in table.splitlines() if line.startswith("| h2o@4096 | 1.000")][:1]
    assert "°" in row


def test_a_folder_without_a_run_is_refused_in_a_line(tmp_path):
    with pytest.raises(kvtool.UsageError, match=r"^no results in `.*nothing`"):
        kvtool.load_results(tmp_path / "nothing")
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(kvtool.UsageError, match="holds no results of kvtool"):
        kvtool.load_results(tmp_path)
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(kvtool.KvtoolError, match="is damaged"):
        kvtool.load_results(tmp_path)


def test_a_pair_that_is_not_compared_is_refused_before_the_run(tmp_path):
    with pytest.raises(kvtool.UsageError, match="--compare names `tova`"):
        kvtool.evaluate(folder=tmp_path / "run", tasks="niah", policies="h2o", compare="h2o,tova")
    assert not (tmp_path / "run").exists()
