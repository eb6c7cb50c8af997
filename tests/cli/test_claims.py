"""A recipe with a claim: what a run says, what scoring anew says, what is refused."""

import json
import re
from pathlib import Path

import pytest

RECIPE = """\
kind: recipe
schema_version: 1
policy: [h2o, random]
budget: [48, 64]
eval:
  tasks:
  - {task: niah, lengths: [128], depths: 6}
generation: {max_new_tokens: 9}
claim:
  says: H2O finds more than chance
  pairs:
  - {variant: h2o, than: random}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text=RECIPE):
        (tmp_path / "claim.yaml").write_text(text)
        return "claim.yaml"

    return write


def test_a_run_says_whether_its_claim_holds(kvtool, recipe):
    done = kvtool("eval", recipe(), "-o", "run", "-f", "text", "--no-plots")
    assert done.code == 0
    said = "claim: H2O finds more than chance: holds (holds in 1 of 1; n=6)"
    assert said in done.out.replace("\n", " ") or said in done.out
    assert re.search("random@64 +niah +h2o@64 +the", done.out)
    results = json.loads(Path("run/results.json").read_text())
    assert results["claim"]["says"] == "H2O finds more than chance"
    [row] = results["claim_verdict"]["rows"]
    assert (row["verdict"], row["budgets"], row["n"]) == ("holds", ["48", "64"], 6)
    assert len(results["samples"]["niah"]) == 6
    again = kvtool("eval", "--rescore", "run", "-q", "--no-plots")
    assert again.code == 0
    anew = json.loads(Path("run/results.json").read_text())
    for name in ("claim", "claim_verdict", "samples", "differences"):
        assert anew[name] == results[name]


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ("{variant: roco, than: random}", "claim.pairs.0.variant: `roco` is none of full, h2o"),
        (
            "{variant: h2o, than: random, budgets: 32}",
            "claim.pairs.0.budgets: `32` is none of 48, 64",
        ),
        ("{variant: h2o, than: h2o}", "claim.pairs.0: `h2o` is compared with itself"),
        ("{variant: h2o}", "than"),
        ("{variant: h2o, than: randm}", "randm"),
    ],
)
def test_a_claim_about_something_else_is_refused(kvtool, recipe, pair, said):
    text = RECIPE.replace("{variant: h2o, than: random}", pair)
    done = kvtool("eval", recipe(text), "-o", "run")
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_a_claim_can_be_left_out(kvtool, recipe):
    done = kvtool("eval", recipe(), "-p", "h2o", "--dry-run")
    assert done.code == 2
    assert "--unset claim" in done.err
    assert kvtool("eval", recipe(), "-p", "h2o", "--unset", "claim", "--dry-run").code == 0
