"""The results in the repository hold what pages are derived from, and no more."""

import importlib.util
import statistics
from pathlib import Path

import pytest

import kvtool
from kvtool.evaluation.run.index import read_results_file

RECIPES = Path(__file__).parents[2] / "recipes"
SPEC = importlib.util.spec_from_file_location("thin_results", RECIPES / "thin.py")
THIN = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(THIN)
NOT_RUNS = ("why", "kvpress")
KEPT = [
    *(path for path in (RECIPES / "claims/results").rglob("*.json") if path.stem not in NOT_RUNS),
    *(RECIPES / "real-model/results").glob("*.json"),
]


def test_results_in_the_repository_are_thin():
    assert len(KEPT) > 30
    thick = [
        str(path.relative_to(RECIPES))
        for path in KEPT
        if path.read_text("utf-8") != THIN.written(THIN.thin(read_results_file(path)))
    ]
    assert thick == []


def test_scores_and_likelihoods_of_samples_are_kept(tmp_path, monkeypatch):
    run = kvtool.evaluate(
        tasks="niah",
        policies=["streaming(sinks=2)"],
        budgets=32,
        lengths="64",
        depths=2,
        samples=3,
        answers="scored",
        folder=tmp_path / "run",
    )
    monkeypatch.setattr("sys.argv", ["thin.py", str(tmp_path / "run"), str(tmp_path / "run.json")])
    THIN.main()
    kept = read_results_file(tmp_path / "run.json")
    assert [(each.variant, each.task) for each in kept.results] == [
        *(("full", "niah"), ("streaming(sinks=2)@32", "niah")),
        *(("full", "niah (nll)"), ("streaming(sinks=2)@32", "niah (nll)")),
    ]
    for before in run.results:
        exact, likely = (kept.of(before.variant, task) for task in ("niah", "niah (nll)"))
        assert exact.scores == before.scores
        [nll] = [metric for metric in before.metrics if metric.name == "nll"]
        assert likely.value == nll.value == pytest.approx(statistics.fmean(likely.scores.sums))
        assert likely.lower_is_better
        assert len(likely.scores.sums) == 6
        assert exact.cost.held_bytes == before.cost.held_bytes
    assert all(not each.cells for each in kept.results)
    assert not kept.differences
