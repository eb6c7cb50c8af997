"""Recipes in `generate` and `compress`: what they set, and what flags lay over them."""

from pathlib import Path

import pytest
import yaml

PROMPT = ("--prompt", "The old lamp was near the school. The quiet falcon was behind the")
RECIPE = """\
kind: recipe
schema_version: 1
model: {dtype: float32}
policy: h2o(recent=2)
modifiers: [caote]
budget: {tokens: 8}
prefill: block:4
generation: {max_new_tokens: 3, temperature: 0.7, stop: [never]}
seed: 5
"""


@pytest.fixture(autouse=True)
def recipe(kvtool):
    """The file `mine.yaml` in the folder that commands run in."""
    Path("mine.yaml").write_text(RECIPE)


def resolved(kvtool, *arguments, stdin=b""):
    done = kvtool("generate", "-q", *PROMPT, "--dry-run", *arguments, stdin=stdin)
    assert (done.code, done.err) == (0, "")
    return yaml.safe_load(done.out)


def test_a_recipe_says_what_flags_leave_open(kvtool):
    told = resolved(kvtool, "mine.yaml")
    assert (told["policy"], told["budget"]) == ("h2o(recent=2)+caote", 8)
    assert (told["prefill"], told["seed"]) == ("block:4", 5)
    assert (told["max_new_tokens"], told["temperature"]) == (3, 0.7)
    assert resolved(kvtool, "-", stdin=RECIPE.encode()) == told


def test_flags_go_before_the_recipe_and_set_before_flags(kvtool):
    told = resolved(
        kvtool, "mine.yaml", "-p", "tova", "-b", "9", "-n", "4", "--temperature", "0", "--seed", "0"
    )
    assert (told["policy"], told["budget"]) == ("tova+caote", 9)
    assert (told["max_new_tokens"], told["temperature"], told["seed"]) == (4, 0.0, 0)
    told = resolved(kvtool, "mine.yaml", "-b", "9", "-s", "budget=10", "--unset", "modifiers")
    assert (told["policy"], told["budget"]) == ("h2o(recent=2)", 10)


def test_what_runs_is_what_the_recipe_says(kvtool):
    done = kvtool("generate", "mine.yaml", *PROMPT, "-f", "json", "-q")
    flags = ("-p", "h2o(recent=2)+caote", "-b", "8", "--prefill", "block:4", "-n", "3")
    same = kvtool("generate", *PROMPT, *flags, "--temperature", "0.7", "--seed", "5", "-f", "json")
    assert done.code == same.code == 0
    ours, theirs = yaml.safe_load(done.out), yaml.safe_load(same.out)
    for name in ("text", "token_ids", "policy", "budget", "cache"):
        assert ours[name] == theirs[name]
    saved = kvtool("compress", "mine.yaml", *PROMPT, "--save", "a.st", "-f", "json", "-q")
    assert saved.code == 0
    assert yaml.safe_load(saved.out)["cache"]["kept_per_layer"] == [8] * 4


def test_a_sweep_is_not_for_one_text(kvtool):
    done = kvtool("generate", "mine.yaml", *PROMPT, "-s", "policy=[tova, h2o]")
    assert done.code == 2
    assert "the recipe has 2 policies: tova+caote, h2o+caote" in done.err
    assert "hint: choose one, --policy" in done.err


def test_mistakes_name_their_place(kvtool):
    Path("mine.yaml").write_text(RECIPE + "budgte: 3\nprefil: full\n")
    done = kvtool("generate", "mine.yaml", *PROMPT)
    assert done.code == 2
    assert done.err.splitlines() == [
        "error: mine.yaml:10:1: budgte: unknown key `budgte`; did you mean `budget`?",
        "    budgte: 3",
        "    ^",
        "mine.yaml:11:1: prefil: unknown key `prefil`; did you mean `prefill`?",
        "    prefil: full",
        "    ^",
    ]


def test_a_stop_text_ends_the_answer(kvtool):
    plain = kvtool("generate", *PROMPT, "-n", "12", "-q").out.strip()
    done = kvtool("generate", *PROMPT, "-n", "12", "-q", "--stop", plain[3]).out.strip()
    assert plain.startswith(done)
    assert len(done) < len(plain)
    assert plain[3] in done[3:]
