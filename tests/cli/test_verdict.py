"""`kvtool eval` ends with a verdict, and `plan-budget --recommend` runs what a run has shown best.

One small comparison of 4 policies under 2 budgets serves all tests. What is counted by hand here
comes from `results.json` and the lines of samples alone.
"""

import json
import math
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
import yaml

import kvtool as library
from kvtool.evaluation.measure import rescore
from kvtool.models.load import load_tokenizer
from kvtool.watcher import Watcher

POLICIES = ["streaming", "h2o+caote", "snapkv(window=8)", "quest"]
BUDGETS = [32, 128]
VARIANTS = len(POLICIES) * len(BUDGETS)
RECIPE = {
    "kind": "recipe",
    "eval": {"tasks": [{"task": "niah", "lengths": "192", "depths": 7}], "within": 20},
    "generation": {"max_new_tokens": 9},
}
TEXT = "The old lamp was near the school. The quiet falcon was behind the tower. " * 20
NEW = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verdict") / "run"
    library.evaluate(RECIPE, folder, policies=POLICIES, budgets=BUDGETS)
    return folder


@pytest.fixture
def results(folder):
    return json.loads((folder / "results.json").read_text())


def scores(folder, variant):
    lines = (
        (folder / "samples" / re.sub(r"[()]", "_", variant) / "niah.jsonl").read_text().splitlines()
    )
    records = {each["id"]: each for each in map(json.loads, lines)}
    return {name: round(each["scores"]["em"]) for name, each in records.items()}


def chance_of_a_loss(ours, full, within):
    """How likely n draws from n samples lose at least X percent: all resamples counted."""
    differences = Counter(ours[name] - full[name] for name in full)
    n, limit = len(full), -within / 100 * sum(full.values())
    ways = Counter({0: 1})
    for _ in range(n):
        longer = Counter()
        for total, count in ways.items():
            for each, times in differences.items():
                longer[total + each] += count * times
        ways = longer
    return sum(count for total, count in ways.items() if total <= limit) / n**n


def by_hand(folder, results, within):
    """Every variant's standing; two where the chance is too near to 2.5 % for 4000 draws."""
    full, standings = scores(folder, "full"), {}
    for variant in (
        variant["name"] for variant in results["variants"] if variant["policy"] != "full"
    ):
        ours = scores(folder, variant)
        gain = 100 * (sum(ours.values()) - sum(full.values())) / sum(full.values())
        chance = chance_of_a_loss(ours, full, within)
        spread = 4 * math.sqrt(0.025 * 0.975 / 4000)
        kinds = {"within"} if chance < 0.025 else {"undecided"}
        kinds |= {"within", "undecided"} if abs(chance - 0.025) < spread else set()
        standings[variant] = {"outside"} if gain <= -within else kinds
    return standings


def cost_by_hand(result, by):
    cost = result["cost"]
    return {
        "bytes": cost["allocated_bytes"] + cost["state_bytes"],
        "traffic": cost["traffic_bytes"],
        "time": 1 / cost["decode_tokens_per_s"],
    }[by]


@pytest.mark.exhaustive
@pytest.mark.parametrize("within", [20, 40])
def test_the_verdict_is_that_of_a_count_by_hand(folder, within):
    rescore(folder, [], Watcher(), within=within)
    results = json.loads((folder / "results.json").read_text())
    verdict, expected = results["verdict"], by_hand(folder, results, within)
    assert (verdict["within"], verdict["tasks"], verdict["why"]) == (within, ["niah"], None)
    found = {each["variant"]: each["standing"] for each in verdict["variants"]}
    assert found.keys() == expected.keys()
    assert len(found) == VARIANTS
    assert not {variant: kind for variant, kind in found.items() if kind not in expected[variant]}
    assert {"within", "outside"} <= set(found.values())
    of_variant = {each["variant"]: each for each in results["results"]}
    assert [choice["by"] for choice in verdict["choices"]] == ["bytes", "traffic", "time"]
    for choice in verdict["choices"]:
        costs = {
            variant: cost_by_hand(result, choice["by"]) for variant, result in of_variant.items()
        }
        good = [
            variant
            for variant in found
            if found[variant] == "within" and costs[variant] < costs["full"]
        ]
        assert choice["variant"] == min(good, key=costs.get, default=None)
        limit = costs[choice["variant"] or "full"]
        unsure = [
            variant for variant in found if found[variant] == "undecided" and costs[variant] < limit
        ]
        assert choice["undecided"] == sorted(unsure, key=costs.get)
        assert choice["full"] == pytest.approx(costs["full"])
        if choice["variant"] is not None:
            assert choice["cost"] == pytest.approx(costs[choice["variant"]])


def test_a_comparison_ends_with_it(folder, kvtool):
    """In the data on stdout, in words on stderr, and on the page."""
    done = kvtool("eval", "--rescore", str(folder), "--within", "20", "-f", "json", "--no-plots")
    assert done.code == 0, done.err
    verdict = json.loads(done.out)["verdict"]
    assert verdict == json.loads((folder / "results.json").read_text())["verdict"]
    page = (folder / "report.html").read_text()
    assert "verdict: the cheapest within 20 % of the full cache, by the paired" in done.err
    for choice in verdict["choices"]:
        if choice["variant"] is not None:
            assert f": {choice['variant']}; " in done.err
            assert f"<dd>{choice['variant']}; " in page


def test_the_bound_stays_that_of_the_run_and_a_wrong_one_is_refused(folder, kvtool):
    for given, kept in ((33.5, 33.5), (None, 33.5), (20, 20)):
        assert rescore(folder, [], Watcher(), within=given).verdict.within == kept
    refused = kvtool("eval", "--rescore", str(folder), "--within", "0")
    assert (refused.code, refused.out) == (2, "")
    assert "error: --within 0.0: must be above 0, got" in refused.err


def test_the_bound_of_a_recipe_is_checked_and_locked(folder, kvtool):
    lock = yaml.safe_load((folder / "recipe.lock.yaml").read_text())
    assert lock["eval"]["within"] == 20
    done = kvtool("eval", "-t", "niah", "-p", "h2o", "--within", "0", "--dry-run")
    assert done.code == 2
    assert "error: --within 0.0: must be above 0, got" in done.err


def test_a_run_without_the_full_cache_has_no_verdict_and_says_so(kvtool):
    arguments = ("-p", "streaming", "-b", "16", "--lengths", "128", "--depths", "1")
    done = kvtool("eval", "-t", "niah", *arguments, "--no-baseline", "-o", "a", "--no-plots")
    assert done.code == 0, done.err
    assert "no verdict: it needs the full cache beside the others (--baseline)" in done.err
    refused = kvtool("plan-budget", "--bytes", "1MiB", "--recommend", "a")
    assert refused.code == 2
    assert "do not tell policies apart: it needs the full cache" in refused.err


# ---- what to run


def recommended(kvtool, folder, *arguments):
    done = kvtool("plan-budget", "--recommend", str(folder), *arguments)
    assert done.code == 0, done.err
    return done


@pytest.mark.parametrize("size", [320_000, 10**7])
def test_the_recommended_command_runs_and_holds_the_bytes_it_promised(kvtool, folder, size):
    tokens = len(load_tokenizer()[0](TEXT)["input_ids"])
    lengths = ("--context", str(tokens + NEW), "-n", str(NEW))
    done = recommended(kvtool, folder, "--bytes", f"{size}B", *lengths, "-o", "best.yaml")
    plan = yaml.safe_load(Path("best.yaml").read_text())
    (printed,) = re.findall(r"^  kvtool (generate best.yaml .*)$", done.err, re.MULTILINE)
    Path("text.txt").write_text(TEXT)
    ran = kvtool(*shlex.split(printed), "--prompt-file", "text.txt", "-f", "json")
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    held = report["cache"]["allocated_bytes"] + report["cache"]["state_bytes"]
    assert report["policy"] == plan["policy"]
    assert report["prompt_tokens"] == tokens
    assert held <= plan["totals"]["bytes"] <= size
    if report["new_tokens"] == NEW:
        assert held == plan["totals"]["bytes"]
    assert (plan["policy"] == "full") == (size == 10**7)
    assert f"recommended: {plan['policy']}, " in done.err


def test_the_recommendation_is_the_best_of_those_that_fit(kvtool, folder, results):
    """Counted anew from the results: budgets as shares, bytes from plans of their own."""
    context, size = 4096, 4_000_000
    done = recommended(kvtool, folder, "--bytes", f"{size}B", "--context", f"{context}", "-n", "16")
    plan = yaml.safe_load(done.out)
    fitting = {}
    for result in results["results"][1:]:
        variant = next(
            variant for variant in results["variants"] if variant["name"] == result["variant"]
        )
        tokens = int(variant["budget"] / result["cost"]["prompt_tokens"] * (context - 16))
        lengths = ("--context", f"{context}", "-n", "16")
        made = kvtool("plan-budget", "-q", "-b", f"{tokens}", "-p", variant["policy"], *lengths)
        if yaml.safe_load(made.out)["totals"]["bytes"] <= size:
            fitting[result["variant"]] = result["value"], -variant["budget"]
    best = max(fitting, key=fitting.get)
    assert 0 < len(fitting) < VARIANTS
    assert plan["policy"] == best.partition("@")[0]
    standing = next(each for each in results["verdict"]["variants"] if each["variant"] == best)[
        "standing"
    ]
    said = standing.replace("undecided", "undecided whether within")
    (line,) = re.findall(r"^evidence: .*$", done.err, re.MULTILINE)
    assert line.startswith(f"evidence: {best} against the full cache: niah")
    assert line.endswith(f"; {said} 20 %")
    assert plan["totals"]["bytes"] <= size
    assert "run it (plan.yaml: what stands on stdout)" in done.err


def test_a_terminal_that_shows_a_picture_is_told_how_to_get_the_plan(at_terminal, folder):
    asked = ("--bytes", "4000000", "--context", "4K")
    done = recommended(at_terminal, folder, *asked)
    assert "█" in done.out
    assert "run it (plan.yaml: -o plan.yaml writes it)" in done.err


def test_results_come_by_folder_file_pipe_and_in_python(kvtool, folder):
    asked = ("--bytes", "4000000", "--context", "4K")
    first = recommended(kvtool, folder, *asked)
    file = folder / "results.json"
    assert recommended(kvtool, file, *asked).out == first.out
    piped = kvtool("plan-budget", *asked, "--recommend", "-", stdin=file.read_bytes())
    assert piped.out == first.out
    plan = library.plan(recommend=folder, bytes=4_000_000, context="4K")
    assert plan.to_data() == yaml.safe_load(first.out)
    assert "-n 128" in first.err, "an answer of the usual length is planned for"


def test_another_model_than_the_measured_one_is_said(kvtool, folder, tmp_path):
    from kvtool.models import reference

    config = json.loads((Path(reference.path()) / "config.json").read_text())
    (tmp_path / "other").mkdir()
    config["num_hidden_layers"] = 2
    config.pop("layer_types", None)
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    done = recommended(kvtool, folder, "-m", "other", "--bytes", "4000000", "--context", "4K")
    assert "note: measured on model `reference`, and the plan is for `other`" in done.err
    assert len(yaml.safe_load(done.out)["layers"]["tokens"]) == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--bytes", "1MiB", "--recommend", "."), "folder `.` holds no run (no results.json)"),
        (("--bytes", "1000B"), "nothing that was measured fits into 1000 B at a context of 4096"),
        (("-b", "512"), "--recommend chooses what fits into a memory"),
        (("--bytes", "1MiB", "-p", "h2o"), "leave out --policy"),
        (("--bytes", "1MiB", "--allocator", "d2o", "--min-tokens", "4"), "--allocator, --min-tok"),
    ],
)
def test_what_gives_no_recommendation_is_one_line(kvtool, folder, arguments, told):
    arguments = (
        arguments if "--recommend" in arguments else (*arguments, "--recommend", str(folder))
    )
    done = kvtool("plan-budget", "--context", "4K", *arguments)
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert (done.code, done.out, len(errors)) == (2, "", 1)
    assert told in errors[0]
