"""An evaluation from Python in one call: what it takes, writes and returns."""

import json
import os

import pytest

import kvtool
from kvtool.documents.plan import PlanDocument
from kvtool.documents.results import ResultsDocument
from kvtool.documents.source import read_source
from kvtool.errors import UsageError
from kvtool.models.load import load
from kvtool.watcher import Watcher
from tests.cli.test_read_once import counting

QUICK = {"tasks": "niah", "lengths": [128], "depths": [50]}
RECIPE = {
    "kind": "recipe",
    "schema_version": 1,
    "policy": ["h2o(recent=4)+caote"],
    "budget": [32],
    "eval": {"tasks": [{"task": "niah", "lengths": 128, "depths": 1}]},
}


def scores(results: ResultsDocument) -> dict:
    return {(each.variant, each.task): (each.value, each.n) for each in results.results}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.exhaustive
def test_a_call_is_the_command_with_the_same_settings(tmp_path):
    from kvtool.cli.main import main

    results = kvtool.evaluate(RECIPE, tmp_path / "python")
    assert results.complete
    assert [variant.name for variant in results.variants] == ["full", "h2o(recent=4)+caote@32"]
    (tmp_path / "mine.yaml").write_text(json.dumps(RECIPE))
    assert main(["eval", "mine.yaml", "-o", "command", "--no-plots", "-q"]) == 0
    command = ResultsDocument(**json.loads((tmp_path / "command" / "results.json").read_text()))
    assert scores(results) == scores(command)
    written = ResultsDocument(**json.loads((tmp_path / "python" / "results.json").read_text()))
    assert written.results == results.results
    locks = [(tmp_path / folder / "recipe.lock.yaml") for folder in ("python", "command")]
    assert locks[0].read_text() == locks[1].read_text()
    again = kvtool.evaluate(tmp_path / "mine.yaml", tmp_path / "python")
    assert again.started == results.started  # all was there already


@pytest.mark.exhaustive
def test_a_loaded_model_is_measured_and_given_back_its_own_attention(tmp_path):
    loaded = load()
    before = loaded.model.config._attn_implementation
    settings = {"policies": ["tova"], "budgets": [24, "50%"], "baseline": False, **QUICK}
    results = kvtool.evaluate(loaded.model, tmp_path / "a", tokenizer=loaded.tokenizer, **settings)
    assert loaded.model.config._attn_implementation == before
    assert set(scores(results)) == {("tova@24", "niah"), ("tova@50%", "niah")}
    by_name = kvtool.evaluate(None, tmp_path / "b", **settings)
    assert scores(by_name) == scores(results)
    recipe = RECIPE | {"model": "no/such", "policy": "tova", "budget": [24, "50%"]}
    settings = {"model": loaded, "baseline": False}
    assert scores(kvtool.evaluate(recipe, tmp_path / "c", **settings)) == scores(results)
    with pytest.raises(UsageError, match="needs its tokenizer"):
        kvtool.evaluate(loaded.model, policies=["tova"], **QUICK)


def test_a_plan_splits_the_budget_of_every_policy(tmp_path):
    from kvtool.cli.main import main

    plan = ["plan-budget", "-b", "40", "--context", "256", "--allocator", "pyramid"]
    assert main([*plan, "-o", "plan.yaml", "-q"]) == 0
    document = read_source("plan.yaml", option="plan").validate(PlanDocument)
    with counting() as found:
        results = kvtool.evaluate(document, "run", policies=["h2o"], **QUICK)
    assert found == {"h2o": 1}  # a plan that is validated already is not validated again
    (variant,) = (variant for variant in results.variants if variant.planned)
    assert variant.name == "h2o@40,plan"
    assert results.of(variant.name, "niah").cost.kept_tokens == 40
    with pytest.raises(UsageError, match="exclude each other"):
        kvtool.evaluate("plan.yaml", policies=["h2o"], budgets=[12], **QUICK)


def test_what_happens_is_told_to_the_watcher(tmp_path):
    class Listening(Watcher):
        def __init__(self):
            self.told = []

        def note(self, text):
            self.told.append(text)

        def show_results(self, results, folder):
            self.told.append(folder)

    watcher = Listening()
    settings = {"policies": "streaming", "budgets": 8, "baseline": False, **QUICK}
    kvtool.evaluate(folder="run", watcher=watcher, **settings)
    assert (
        watcher.told[0] == "note: 8 tokens are a handful; what comes of so few makes little sense"
    )
    assert str(watcher.told[-1]) == "run"
    assert os.listdir() == ["run"]


def test_mistakes_are_told_before_the_model_loads(monkeypatch):
    for settings, message in [
        ({"policies": ["h2oo"]}, "no policy named `h2oo`"),
        ({"policies": ["h2o"], "tasks": "niahh"}, "no task `niahh`"),
        ({"policies": ["h2o"], "data": {"ppl": "x"}}, "--data ppl=..: no such task"),
        (
            {"tasks": "ppl", "depths": None, "data": {"haystack": "x"}},
            "--data haystack=..: no such task",
        ),
        ({"policies": ["h2o"], "data": {"haystack": "gone.txt"}}, "gone.txt` is neither builtin"),
        ({"policies": ["h2o"], "fail_under": {"ppl": 1}}, "gate on `ppl`: no such task"),
        ({"policies": ["h2o"], "max_drop": 3, "baseline": False}, "a largest drop is one from"),
    ]:
        monkeypatch.setattr("kvtool.models.attached.load", lambda *a, **k: pytest.fail("loaded"))
        with pytest.raises(UsageError, match=message):
            kvtool.evaluate(**{**QUICK, **settings})
