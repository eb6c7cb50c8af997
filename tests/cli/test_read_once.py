"""A recipe is read once: no policy string and no plan in it is read again on the way to results."""

import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.test_plans import planned

QUICK = ("--no-plots", "-q", "-f", "json", "-o", "run")
RECIPE = """\
kind: recipe
schema_version: 1
policy: [h2o(recent=4), {name: snapkv, window: 8}]
modifiers: [caote]
budget: [32, 50%]
allocator: pyramid
eval: {tasks: [{task: niah, lengths: 128, depths: 1}]}
"""
PLANNED = """\
kind: recipe
schema_version: 1
policy: [h2o, tova]
budget: {plan: plan.yaml}
eval: {tasks: [{task: niah, lengths: 128, depths: 1}]}
"""


@contextmanager
def counting():
    """Count by text the policy strings that are parsed meanwhile, and the plans validated."""
    found = Counter()

    def watch(frame, event, argument):
        if event != "call":
            return
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name == "show_results":  # the results are written; the page reads the run's own files
            sys.setprofile(None)
        elif name in ("parse_policy", "read_spelling") and file.endswith("grammar.py"):
            text = frame.f_locals["text"]
            if isinstance(text, str):
                found[text] += 1
        elif name == "_tokens_are_those_of_the_target" and "documents" in file:
            found["plan"] += 1

    sys.setprofile(watch)
    try:
        yield found
    finally:
        sys.setprofile(None)


@pytest.mark.exhaustive
def test_a_policy_string_is_parsed_once_from_the_recipe_to_the_results(kvtool):
    Path("mine.yaml").write_text(RECIPE)
    with counting() as found:
        done = kvtool("eval", "mine.yaml", *QUICK)
    assert done.code == 0, done.err
    assert set(found) - {"full"} == {"h2o(recent=4)+caote", "snapkv(window=8)+caote"}
    assert set(found.values()) == {1}, found


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["pipe", "file", "recipe"])
def test_a_plan_is_validated_once_from_the_recipe_to_the_results(kvtool, way):
    plan = planned(kvtool, "--ratio", "30%", "-p", "h2o")
    Path("plan.yaml").write_bytes(plan)
    Path("mine.yaml").write_text(PLANNED)
    task = ("-t", "niah", "--lengths", "128", "--depths", "1", "-p", "h2o,tova")
    source = {"pipe": ("-", *task), "file": ("plan.yaml", *task), "recipe": ("mine.yaml",)}[way]
    with counting() as found:
        done = kvtool("eval", *source, *QUICK, stdin=plan if way == "pipe" else b"")
    assert done.code == 0, done.err
    assert found["plan"] == 1
    times = 1 if way == "recipe" else 2  # what is typed is checked before anything is imported
    assert (found["h2o"], found["tova"]) == (times, times)


@pytest.mark.parametrize("more", [(), ("--allocator", "pyramid")])
def test_generate_parses_its_policy_once(kvtool, more):
    Path("mine.yaml").write_text("kind: recipe\nschema_version: 1\npolicy: h2o(recent=4)\n")
    prompt = ("--prompt", "The old lamp was near the school.", "-n", "2", "-q", "-b", "12")
    with counting() as found:
        done = kvtool("generate", "mine.yaml", *prompt, *more)
    assert done.code == 0, done.err
    assert found == {"h2o(recent=4)": 1}
