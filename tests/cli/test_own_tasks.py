"""Tasks of the user's own: questions in a file, and a class named by its module."""

from __future__ import annotations

import json
import sys

import pytest
import yaml

TASK = '''
"""Say the last word of a text again."""

from kvtool.evaluation.samples.sample import Sample, Turn
from kvtool.evaluation.tasks.asking import Asking


class Last(Asking):
    """Say the last word again."""

    words: int = 40
    samples: int = 2

    metric = "accuracy"

    def draw(self, tokens):
        for i in range(self.samples):
            text = "The lamp was near the school. " * (self.words // 6 + i)
            yield Sample(f"last/{i}", text, (Turn(" The lamp was near the", ("school",), 3),))

    def score_answer(self, prediction, references, facts):
        return 100.0 * (references[0] in prediction)


class Halfway(Asking):
    metric = "accuracy"
'''
NAME = "my_tasks:Last"
RUN = ("-p", "streaming", "-b", "16", "--no-plots", "-q", "-o", "run")


@pytest.fixture
def module(tmp_path):
    (tmp_path / "my_tasks.py").write_text(TASK)
    yield tmp_path
    sys.modules.pop("my_tasks", None)


def forget():
    sys.modules.pop("my_tasks", None)


def test_a_file_of_questions_is_a_task(kvtool, tmp_path):
    rows = [
        {"context": "The code is 7. " * 20, "question": "The code?", "answers": [str(i), "7"]}
        for i in range(2)
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = kvtool("eval", "-t", "qa", "--data", "mine.jsonl", *RUN, "-f", "json")
    assert done.code == 0, done.err
    results = json.loads(done.out)["results"]
    assert [(each["variant"], each["task"], each["n"]) for each in results] == [
        ("full", "qa", 2),
        ("streaming@16", "qa", 2),
    ]
    names = [metric["name"] for metric in results[0]["metrics"]]
    assert names == ["qa_f1", "exact_match", "string_match_part"]


def test_a_class_is_a_task(kvtool, module):
    done = kvtool("eval", "-t", NAME, "-s", "eval.tasks.0.words=60", *RUN, "-f", "json")
    assert done.code == 0, done.err
    results = json.loads(done.out)["results"]
    assert {(each["task"], each["n"]) for each in results} == {(NAME, 2)}
    forget()
    refused = kvtool("eval", "--rescore", "run", "-q", "--no-plots")
    assert refused.code == 2
    assert f"--tasks '{NAME}' imports it" in refused.err
    assert "my_tasks" not in sys.modules
    again = kvtool("eval", "--rescore", "run", "-t", NAME, "-q", "--no-plots", "-f", "json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["results"][0]["value"] == results[0]["value"]


def test_an_answer_depends_on_the_code_of_the_task(kvtool, module):
    assert kvtool("eval", "-t", NAME, *RUN).code == 0
    forget()
    (module / "my_tasks.py").write_text(TASK.replace("Say the last word of", "Repeat the end of"))
    changed = kvtool("eval", "-t", NAME, *RUN)
    assert changed.code == 2
    assert "under other settings" in changed.err


def test_a_recipe_does_not_name_code(kvtool, module):
    recipe = {"kind": "recipe", "schema_version": 1, "policy": "h2o", "eval": {"tasks": [NAME]}}
    (module / "own.yaml").write_text(yaml.safe_dump(recipe))
    done = kvtool("eval", "own.yaml", "--dry-run")
    assert done.code == 2
    assert "no file may name code" in done.err
    assert "my_tasks" not in sys.modules
    assert kvtool("eval", "own.yaml", "-t", NAME, "--dry-run", "-q").code == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_tasks:Lost", "module `my_tasks` has no class `Lost`"),
        ("my_tasks:Sample", "task `my_tasks:Sample` is no class under Task"),
        ("my_tasks:Halfway", "task `my_tasks:Halfway` lacks draw, score_answer"),
        ("no_such_module:Task", "no module named `no_such_module`"),
        ("my tasks:Last", "cannot read `my tasks:Last` as a task"),
    ],
)
def test_what_is_no_task_is_refused_in_a_line(kvtool, module, name, message):
    done = kvtool("eval", "-t", name, *RUN)
    assert done.code == 2
    assert message in done.err


def test_a_file_for_no_task_is_refused(kvtool, module):
    (module / "mine.jsonl").write_text("{}")
    done = kvtool("eval", "-t", "niah", "--data", "mine.jsonl", *RUN)
    assert done.code == 2
    assert "--data FILE: no such task in this run, or it takes no data" in done.err
