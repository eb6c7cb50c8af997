"""Defaults from variables of the environment: below options, recipes and plans."""

import json

import pytest
import yaml

import kvtool as library
from kvtool.models import reference

RECIPE = {"kind": "recipe", "schema_version": 1}


@pytest.fixture
def resolved(kvtool):
    """What a command without a run would do."""

    def resolve(*arguments, command="generate"):
        done = kvtool(command, *arguments, "--dry-run", "-f", "json", "-q")
        assert done.code == 0, done.err
        return json.loads(done.out)

    return resolve


@pytest.fixture
def environment(monkeypatch):
    given = {"MODEL": str(reference.path()), "DEVICE": "cpu", "DTYPE": "bfloat16"}
    given |= {"POLICY": "h2o", "BUDGET": "48"}
    for name, value in given.items():
        monkeypatch.setenv(f"KVTOOL_{name}", value)


PROMPT = ("--prompt", "The old lamp")
NAMES = ("model", "device", "dtype", "policy", "budget")


def test_variables_are_defaults_and_options_override_them(resolved, environment):
    found = resolved(*PROMPT)
    assert [found[name] for name in NAMES] == [str(reference.path()), "cpu", "bfloat16", "h2o", 48]
    found = resolved(*PROMPT, "-p", "tova", "-b", "32", "--dtype", "float32")
    assert [found[name] for name in NAMES[2:]] == ["float32", "tova", 32]


def test_a_recipe_overrides_what_it_says(resolved, environment, tmp_path):
    recipe = RECIPE | {"policy": "tova", "model": {"dtype": "float32"}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(recipe))
    found = resolved("a.yaml", *PROMPT)
    assert [found[name] for name in NAMES] == [str(reference.path()), "cpu", "float32", "tova", 48]
    assert resolved("a.yaml", *PROMPT, "-p", "h2o")["policy"] == "h2o"
    assert resolved("a.yaml", *PROMPT, "--set", "policy=roco")["policy"] == "roco"


def test_a_plan_brings_its_budget(kvtool, environment, tmp_path):
    plan = library.plan(None, tokens=40, context=256, allocator="pyramid")
    (tmp_path / "plan.json").write_text(plan.to_json())
    done = kvtool("generate", "plan.json", *PROMPT, "--dry-run", "-f", "json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["policy"] == "h2o"
    assert "budget: as planned, 40 split by pyramid" in done.err


def test_an_evaluation_takes_them_below_its_recipe(resolved, environment, tmp_path):
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(RECIPE | {"budget": [32, 64]}))
    given = ("a.yaml", "-t", "niah", "--lengths", "128", "--samples", "1", "--depths", "1")
    found = resolved(*given, command="eval")
    assert (found["policy"], found["budget"]) == (["h2o"], [32, 64])
    assert found["model"]["dtype"] == "bfloat16"
    assert resolved(*given, "-p", "tova", command="eval")["policy"] == ["tova"]


def test_a_budget_alone_and_a_saved_cache_are_no_mistakes(kvtool, resolved, monkeypatch):
    monkeypatch.setenv("KVTOOL_BUDGET", "48")
    assert resolved(*PROMPT)["policy"] == "full"
    kvtool("compress", "-p", "tova", "-b", "32", *PROMPT, "--save", "a.st")
    monkeypatch.setenv("KVTOOL_POLICY", "h2o")
    found = resolved("--cache", "a.st", *PROMPT)
    assert (found["policy"], found["budget"]) == ("tova", 32)


def test_python_calls_do_not_read_them(environment):
    document = library.generate(None, "The old lamp", max_new_tokens=1)
    assert document.policy == "full"


def test_a_wrong_value_is_one_line(kvtool, monkeypatch):
    monkeypatch.setenv("KVTOOL_DTYPE", "float9")
    done = kvtool("generate", *PROMPT)
    assert done.code == 2
    assert "--dtype: `float9` is not one of `auto`" in done.err.splitlines()[0]
