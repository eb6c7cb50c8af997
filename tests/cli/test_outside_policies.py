"""Policies from outside the package: imported when asked for, never because a file says so."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import yaml

import kvtool as library
from kvtool.errors import KvtoolError, UsageError
from kvtool.models.load import load
from tests.models_for_tests import peaky_model, random_ids

README = (Path(__file__).parents[2] / "kvtool" / "README.md").read_text()
SCORE = '''
"""Accumulated attention, as h2o has it."""
print("said while imported")
from dataclasses import dataclass
from typing import ClassVar, Literal, Optional

from kvtool.policies.parts import Evidence, Score


@dataclass(frozen=True)
class MyScore(Score):
    recent: Optional[int] = 4
    kind: Literal["one", "two"] = "one"
    pair: tuple = ()

    name: ClassVar = "mine"
    paper: ClassVar = "-"
    evidence: ClassVar = Evidence.COLUMNS
    statistics: ClassVar = ("attention_sum",)
    attention: ClassVar = True

    def __post_init__(self):
        if self.recent == 13:
            raise ValueError("13 is not liked")

    def importance(self, state, view, rows):
        return state["attention_sum"]

    def protected(self, state, view, evicted):
        return view.recent(self.recent)

    def reserved(self, budget):
        return {"recent": self.recent}


class Bare(Score):
    name: ClassVar = "bare"


@dataclass(frozen=True)
class Nameless(Score):
    def importance(self, state, view, rows):
        return state["attention_sum"]

'''
DOCSTRING = """Keep what was attended to.

    Args:
        recent: newest tokens that stay.
    \"\"\"
"""
POLICY = "my_own.scores:MyScore(recent=8)+caote"


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_own"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def package(tmp_path):
    folder = tmp_path / "my_own"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "scores.py").write_text(SCORE)
    (folder / "broken.py").write_text("import json\n\nprint(json.nothing)\n")
    (folder / "leaving.py").write_text("raise SystemExit(0)\n")
    (folder / "lacking.py").write_text("import no_such_package_at_all\n")
    forget()
    yield folder
    forget()


def generate(kvtool, *arguments) -> dict:
    done = kvtool("generate", "-q", "-f", "json", "-n", "6", *arguments)
    assert done.code == 0, done.err
    return json.loads(done.out)


def refused(done, code=2) -> str:
    """The one line of an error, and perhaps a hint."""
    assert done.code == code
    assert done.out == ""
    lines = [line for line in done.err.splitlines() if line != "said while imported"]
    assert lines[0].startswith("error: ")
    assert [line.partition(":")[0] for line in lines[1:]] in ([], ["hint"])
    return "\n".join(lines)


def test_a_score_of_ones_own_decides_as_its_twin_in_the_package(kvtool):
    own = generate(kvtool, "-p", POLICY, "-b", "32", "--prompt", "a b c d e f g " * 20)
    twin = generate(
        kvtool, "-p", "h2o(recent=8)+caote", "-b", "32", "--prompt", "a b c d e f g " * 20
    )
    assert own["token_ids"] == twin["token_ids"]
    assert own["cache"] == twin["cache"]
    assert own["policy"] == POLICY


def test_it_is_spelled_as_it_is_read(kvtool):
    policy = library.parse_policy(" my_own.scores:MyScore( Recent = 8 )+CAOTE")
    assert str(policy) == POLICY
    assert library.parse_policy(POLICY) == policy
    assert str(library.parse_policy("my_own.scores:MyScore(recent=4)")) == "my_own.scores:MyScore"
    assert str(library.parse_policy("my_own.scores:MyScore(recent=none)")).endswith("(recent=none)")
    loaded = load()
    library.attach(loaded.model)
    assert str(library.build_cache(loaded.model, POLICY, 32).policy) == POLICY


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("my_own.score:MyScore", "no module named `my_own.score`"),
        ("my_own.scores:MyScor", "hint: did you mean `MyScore`?"),
        ("my_own.scores:myscore", "module `my_own.scores` has no class `myscore`"),
        ("my_own.scores:Score", "it is no class under Score"),
        ("my_own.scores:Bare", "it is no frozen dataclass"),
        ("my_own.scores:Nameless", "it has no `name`"),
        ("my_own.scores:MyScore(kind=three)", "kind must be one of one, two"),
        ("my_own.scores:MyScore(pair=1)", "pair cannot be set in a policy string"),
        ("my_own.scores:MyScore(recent=13)", "ValueError: 13 is not liked"),
        ("my_own.broken:MyScore", "cannot import module `my_own.broken`: AttributeError: module"),
        ("my_own.leaving:MyScore", "cannot import module `my_own.leaving`: SystemExit: 0"),
        ("my_own.lacking:MyScore", "No module named 'no_such_package_at_all'"),
        ("my_own.scores:", "cannot read `my_own.scores:` as a policy"),
        ("h2o+my_own.scores:MyScore", "is a base policy and cannot modify `h2o`"),
    ],
)
def test_what_is_no_score_is_refused_in_a_line(kvtool, policy, told):
    assert told in refused(kvtool("generate", "-q", "-p", policy, "-b", "32"))


def test_a_setting_without_a_default_is_refused(kvtool, package):
    (package / "demanding.py").write_text(
        "from dataclasses import dataclass\nfrom kvtool.policies.parts import Score\n\n"
        "@dataclass(frozen=True)\nclass Demanding(Score):\n    must: int\n    name = 'x'\n\n"
        "    def importance(self, state, view, rows):\n        return view.positions.float()\n"
    )
    error = refused(kvtool("generate", "-q", "-p", "my_own.demanding:Demanding"))
    assert "its setting `must` has no default value" in error


def test_a_saved_cache_does_not_import_what_it_names(kvtool, tmp_path):
    text = ("--prompt", "a b c d e f g " * 20)
    kvtool("compress", "-q", "-p", POLICY, "-b", "32", *text, "--save", "a.safetensors")
    unbroken = generate(kvtool, "--cache", "a.safetensors")  # its module is imported already
    forget()
    error = refused(kvtool("generate", "-q", "--cache", "a.safetensors"))
    assert "my_own.scores:MyScore` is from a module that is not imported" in error
    assert "my_own" not in sys.modules
    loaded = load()
    with pytest.raises(KvtoolError, match="is not imported"):
        library.load_cache("a.safetensors", library.attach(loaded.model))
    other = "my_own.scores:MyScore(recent=9)+caote"
    error = refused(kvtool("generate", "-q", "--cache", "a.safetensors", "-p", other))
    assert "was made with policy" in error
    forget()
    again = generate(kvtool, "--cache", "a.safetensors", "-p", POLICY)
    assert again["token_ids"] == unbroken["token_ids"]


@pytest.mark.exhaustive
def test_a_recipe_names_it_and_its_run_goes_on(kvtool, tmp_path):
    recipe = {
        "kind": "recipe",
        "schema_version": 1,
        "policy": [POLICY, {"name": "my_own.scores:MyScore", "recent": 2}],
        "budget": 32,
        "eval": {"baseline": False, "tasks": [{"task": "niah", "lengths": "256", "depths": "2"}]},
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(recipe))
    named = ("-p", f"{POLICY},my_own.scores:MyScore(recent=2)")
    run = ("eval", "own.yaml", *named, "-q", "-f", "json", "--no-plots", "-o", "run")
    first = kvtool(*run, "--limit", "1")
    assert first.code == 0, first.err
    forget()
    done = kvtool(*run, "--resume")
    assert done.code == 0, done.err
    results = json.loads(done.out)
    assert [each["policy"] for each in results["variants"]] == [
        POLICY,
        "my_own.scores:MyScore(recent=2)",
    ]
    folders = sorted(path.name for path in (tmp_path / "run" / "samples").iterdir())
    assert folders == [
        "my_own.scores_MyScore_recent=2_@32",
        "my_own.scores_MyScore_recent=8_+caote@32",
    ]
    forget()
    rescored = ("eval", "--rescore", "run", "-q", "-f", "json", "--no-plots")
    assert "is not imported" in refused(kvtool(*rescored))
    assert "leave out --policy" in refused(kvtool(*rescored, "-p", "h2o"))
    assert kvtool(*rescored, "-p", POLICY).code == 0
    forget()
    lock = ("eval", "run/recipe.lock.yaml", "-q", "-f", "json", "--no-plots", "-o", "again")
    error = refused(kvtool(*lock))
    assert "what a run or a plan names is not imported" in error
    assert "my_own" not in sys.modules
    assert kvtool(*lock, "-p", POLICY, "--dry-run").code == 0


@pytest.mark.parametrize(
    "policy",
    [
        *({"name": "my_own.scores:MyScore"}, ["h2o", f" {POLICY}"]),
        *(f"h2o,{POLICY}", f"h2o+{POLICY}", "my_own.lazy:MyScore"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "eval"])
@pytest.mark.each_once
@pytest.mark.few(3)
def test_a_recipe_does_not_import_what_it_names(kvtool, tmp_path, package, policy, command):
    marker = tmp_path / "imported"
    (package / "scores.py").write_text(f"open({str(marker)!r}, 'w')\n{SCORE}")
    (package / "lazy.py").write_text((package / "scores.py").read_text())
    recipe = {"kind": "recipe", "schema_version": 1, "policy": policy, "budget": 32}
    (tmp_path / "inner.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "outer.yaml").write_text("kind: recipe\nschema_version: 1\ninclude: inner.yaml\n")
    more = ("-t", "niah") if command == "eval" else ()
    for file in ("inner.yaml", "outer.yaml"):
        for extra in ((), ("--set", "seed=1"), ("--set", "policy_x=1")):
            done = kvtool(command, file, "--dry-run", *more, *extra)
            assert done.code == 2
            assert "what a recipe names is not imported" in done.err or "unknown key" in done.err
            assert "Traceback" not in done.err
    assert not marker.exists()
    done = kvtool(command, "outer.yaml", "--dry-run", *more, "-p", POLICY)
    assert done.code == 0, done.err
    assert marker.exists()


def test_a_recipe_in_python_may_name_code_and_one_in_a_file_may_not(kvtool, tmp_path):
    from kvtool.calls.resolve import resolve_settings
    from kvtool.calls.settings import GenerationSettings
    from kvtool.documents.resolve import document_of

    recipe = {"kind": "recipe", "schema_version": 1, "policy": POLICY, "budget": 32}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(recipe))
    typed = GenerationSettings(recipe=document_of(recipe, "a recipe"))
    assert resolve_settings(typed, "kvtool generate")[0].policy == POLICY
    with pytest.raises(UsageError, match=r"own\.yaml` names policy"):
        resolve_settings(GenerationSettings(recipe="own.yaml"), "kvtool generate")


def test_the_pairs_of_a_claim_import_nothing(kvtool, tmp_path):
    claim = {"text": "a", "pairs": [{"task": "niah", "variant": POLICY, "than": "h2o"}]}
    recipe = {"kind": "recipe", "schema_version": 1, "policy": "h2o", "claim": claim}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(recipe))
    done = kvtool("eval", "own.yaml", "-t", "niah", "--dry-run")
    assert done.code == 2
    assert "my_own" not in sys.modules


def recipe_of_own_tasks(tmp_path):
    task = {"task": "lm-eval/mine", "include_path": str(tmp_path)}
    recipe = {"kind": "recipe", "schema_version": 1, "policy": "h2o", "eval": {"tasks": [task]}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(recipe))


def test_a_recipe_does_not_name_tasks_that_run_code(kvtool, tmp_path):
    recipe_of_own_tasks(tmp_path)
    error = refused(kvtool("eval", "own.yaml", "--dry-run"))
    assert "no file may name code" in error


@pytest.mark.exhaustive
def test_a_command_line_names_tasks_that_run_code(kvtool, tmp_path):
    recipe_of_own_tasks(tmp_path)
    done = kvtool("eval", "own.yaml", "--dry-run", "-s", f"eval.tasks.0.include_path={tmp_path}")
    assert "no file may name code" not in done.err


def test_a_plan_does_not_import_what_it_names(kvtool):
    made = kvtool("plan-budget", "-b", "32", "--context", "256", "-p", POLICY, "-o", "plan.yaml")
    assert made.code == 0, made.err
    assert kvtool("generate", "plan.yaml", "-q", "-n", "2").code == 0
    forget()
    assert "is not imported" in refused(kvtool("generate", "plan.yaml", "-q", "-n", "2"))
    assert "my_own" not in sys.modules
    assert kvtool("generate", "plan.yaml", "-q", "-n", "2", "-p", POLICY).code == 0


def test_a_file_does_not_ask_a_module_for_more_than_it_holds(package):
    from kvtool.policies.grammar import read_spelling

    (package / "lazy.py").write_text("def __getattr__(name):\n    import my_own.broken\n")
    with pytest.raises(UsageError, match="is not imported"):
        read_spelling("my_own.lazy:MyScore")
    sys.path.insert(0, str(package.parent))
    try:
        __import__("my_own.lazy")
    finally:
        sys.path.pop(0)
    with pytest.raises(UsageError, match="has no class `MyScore`"):
        read_spelling("my_own.lazy:MyScore")


def test_the_readmes_policy_runs_from_a_module(kvtool, package):
    code = re.search(r"   ```python\n(   \"\"\"Peak.*?)   ```", README, re.DOTALL)[1]
    (package.parent / "my_peak.py").write_text(re.sub(r"^   ", "", code, flags=re.MULTILINE))
    command = re.search(r"^   (kvtool generate .*my_peak:Peak.*)$", README, re.MULTILINE)[1]
    done = kvtool(*shlex.split(command)[1:], "-q", "-n", "4", "-f", "json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["policy"] == "my_peak:Peak(recent=8)+caote"
    assert set(told["cache"]["kept_per_layer"]) == {256}
    assert told["cache"]["tokens_seen"] > 900
    ids, model = random_ids(40), peaky_model("llama", "eager")
    weights = model(ids, output_attentions=True).attentions
    cache = library.build_cache(library.attach(model), "my_peak:Peak(recent=4)", 12)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    for layer in range(2):
        peaks = weights[layer][0].unflatten(0, (2, 4)).mean(1).amax(1)  # (kv_heads, tokens)
        best = peaks[:, :36].topk(8).indices.sort().values
        expected = [[*head, 36, 37, 38, 39] for head in best.tolist()]
        assert cache.kept_positions(layer)[0].tolist() == expected


def test_one_is_described_by_its_docstrings(kvtool, package):
    (package / "told.py").write_text(
        SCORE.replace("class MyScore(Score):", 'class MyScore(Score):\n    """' + DOCSTRING, 1)
    )
    done = kvtool("policies", "my_own.told:MyScore", "-f", "json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["name"] == "my_own.told:MyScore"
    assert told["summary"] == "Keep what was attended to."
    assert told["paper"] == "-"
    assert told["parameters"] == {"recent": 4, "kind": "one", "pair": []}
    assert told["settings"][0]["meaning"] == "newest tokens that stay."
    assert told["text"] == "Accumulated attention, as h2o has it."
    assert {"my_own.told:MyScore+caote", "my_own.told:MyScore+int8"} <= set(told["takes"])
    assert "newest tokens that stay." in kvtool("policies", "my_own.told:MyScore").out
    bare = json.loads(kvtool("policies", POLICY, "-f", "json").out)
    assert bare["summary"] == "(no docstring)"


def test_one_that_breaks_it_is_shown_in_a_table(kvtool, package):
    (package / "wrong.py").write_text(
        SCORE.replace('return {"recent": self.recent}', "return {}", 1)
    )
    done = kvtool("policies", "my_own.wrong:MyScore", "--check")
    assert done.code == 1
    assert "error: my_own.wrong:MyScore fails 2 of 12 checks" in done.err
    assert "4 tokens of a head are protected, and `reserved` counts 0" in " ".join(done.out.split())


def test_a_check_needs_a_policy(kvtool):
    assert "--check needs a policy" in refused(kvtool("policies", "--check"))


def test_a_mistake_of_a_running_score_is_one_line(kvtool, package):
    (package / "nan.py").write_text(
        SCORE.replace('return state["attention_sum"]', 'return state["attention_sum"] / 0 * 0', 1)
    )
    done = kvtool("generate", "-q", "-p", "my_own.nan:MyScore", "-b", "32", "-n", "2")
    told = refused(done, code=1)
    line = 1 + (package / "nan.py").read_text().splitlines().index(
        "    def importance(self, state, view, rows):"
    )
    assert told == (
        "error: my_own.nan:MyScore: importance returns nan for a token that is stored "
        f"(nan.py, line {line})"
    )


def test_caote_says_how_it_is_allowed(kvtool, package):
    (package / "quiet.py").write_text(SCORE.replace("    attention: ClassVar = True\n", "", 1))
    told = refused(kvtool("generate", "-q", "-p", "my_own.quiet:MyScore+caote", "-b", "32"))
    assert "`my_own.quiet:MyScore` has none" in told
    assert "attention: ClassVar = True" in told
