"""`--guarantee` from a command to a plan, and what is chosen afterwards.

One small comparison under three budgets serves all tests; 14 samples without a loss show 20 %.
"""

import json
import shutil

import pytest
import yaml

import kvtool as library
from kvtool.errors import UsageError

ASKED = ("-t", "niah", "--lengths", "128", "--depths", "5", "--samples", "3", "--no-plots")
RUN = (*ASKED, "-p", "h2o", "-b", "16,64,80")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarantee") / "run"
    library.evaluate(
        folder=folder,
        tasks="niah",
        policies="h2o",
        budgets=[16, 64, 80],
        lengths=128,
        depths=5,
        samples=3,
        guarantee=20,
    )
    return folder


@pytest.fixture
def run(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "own")


def guarantee(folder):
    return json.loads((folder / "results.json").read_text())["verdict"]["guarantee"]


def correct(folder, variant):
    lines = (folder / "samples" / variant / "niah.jsonl").read_text().splitlines()
    return {each["id"]: each["scores"]["em"] for each in map(json.loads, lines)}


def test_its_losses_are_those_of_the_samples(folder):
    found, full = guarantee(folder), correct(folder, "full")
    assert (found["loss"], found["level"]) == (20, 0.05)
    assert [each["variant"] for each in found["chain"]] == [
        "h2o@80",
        "h2o@64",
        "h2o@16",
    ]
    for each in found["chain"]:
        ours = correct(folder, each["variant"])
        assert each["lost"] == sum(full[name] > ours[name] for name in full)
        assert (each["n"], each["task"], each["why"]) == (15, "niah", None)
        assert each["passed"] == (each["lost"] == 0)  # .8 ** 15 = .035, and 1 of 15 is .167
    assert {each["passed"] for each in found["chain"]} == {True, False}


def test_it_is_asked_for_before_the_run_and_kept(kvtool, run):
    assert yaml.safe_load((run / "recipe.lock.yaml").read_text())["eval"]["guarantee"] == 20
    before = guarantee(run)
    done = kvtool("eval", "--rescore", str(run), "--no-plots", "-f", "json")
    assert (done.code, guarantee(run)) == (0, before)
    assert "guarantee: with 95 % confidence at most 20 % of prompts like these lose" in done.err
    assert "guarantee: with 95 % confidence at most 20 % of" in (run / "report.html").read_text()


def test_the_same_command_goes_on_and_keeps_it(kvtool, run):
    again = kvtool("eval", *RUN, "--guarantee", "20", "-o", str(run), "-f", "json")
    assert again.code == 0, again.err
    assert "resumed 60/60" in again.err
    assert json.loads(again.out)["verdict"]["guarantee"]["loss"] == 20


@pytest.mark.parametrize(
    "asked",
    [
        (*RUN, "--guarantee", "25"),
        (*ASKED, "-p", "h2o", "-b", "64,80", "--guarantee", "20"),
        (*RUN, "--seed", "1", "--guarantee", "20"),
    ],
    ids=["bound", "budgets", "samples"],
)
def test_what_is_chosen_after_the_run_is_refused(kvtool, run, asked):
    before = (run / "results.json").read_bytes()
    done = kvtool("eval", *asked, "-o", str(run))
    assert (done.code, done.out) == (2, "")
    assert "chosen afterwards: no guarantee" in done.err or "holds an answer" in done.err
    assert (run / "results.json").read_bytes() == before


@pytest.mark.parametrize("more", [("--guarantee", "20"), ("--guarantee", "5", "-b", "64")])
def test_rescoring_chooses_none(kvtool, run, more):
    done = kvtool("eval", "--rescore", str(run), *more)
    assert (done.code, done.out) == (2, "")
    assert "--rescore takes a run as it is; leave out --" in done.err
    assert "hint: chosen afterwards: no guarantee" in done.err


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ((*RUN, "--guarantee", "5"), "--guarantee 5 takes 59 contexts of each task"),
        ((*RUN, "--guarantee", "5"), "niah has 15"),
        (("-t", "fidelity", "-p", "h2o", "--guarantee", "5"), "fidelity has no score"),
        (("-t", "ppl", "-p", "h2o", "--guarantee", "5"), "ppl has no score"),
        ((*RUN, "--guarantee", "20", "--no-baseline"), "compares policies with the full cache"),
        ((*RUN, "--guarantee", "0"), "--guarantee 0.0: must be above 0"),
        ((*RUN, "--guarantee", "100"), "--guarantee 100.0: must be below 100"),
    ],
)
def test_a_guarantee_that_the_run_cannot_give_is_one_line(kvtool, asked, told):
    done = kvtool("eval", *asked, "--dry-run")
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert (done.code, done.out, len(errors)) == (2, "", 1), done.err
    assert told in errors[0]


# ---- what to run

WHERE = ("--context", "4K", "--bytes")


def test_only_what_is_guaranteed_is_recommended_at_the_measured_share(kvtool, run):
    least = next(each for each in reversed(guarantee(run)["chain"]) if each["passed"])
    asked = ("plan-budget", "--recommend", str(run), "--guarantee", "20", *WHERE, "7MiB")
    done = kvtool(*asked)
    assert done.code == 0, done.err
    assert "guarantee: with 95 % confidence at most 20 % of prompts" in done.err
    assert f"evidence: {least['variant']} against" in done.err
    results = library.load_results(run)
    prompt = results.of(least["variant"], "niah").cost.prompt_tokens
    plan = yaml.safe_load(done.out)
    share = int(least["variant"].partition("@")[2]) / prompt
    context = 4096 - plan["target"]["max_new_tokens"]
    assert plan["layers"]["tokens"][0] == int(share * context)
    same = library.plan(recommend=run, guarantee=20, bytes="7MiB", context="4K")
    assert same.to_data() == plan
    small = kvtool(*asked[:-1], "4MiB")
    assert small.code == 2
    assert "h2o@16: not guaranteed" in small.err


def test_another_guarantee_than_that_of_the_run_is_none(kvtool, folder, run):
    done = kvtool("plan-budget", "--recommend", str(run), "--guarantee", "5", *WHERE, "7MiB")
    assert (done.code, done.out) == (2, "")
    assert "the run was made with a guarantee of 20 %; chosen afterwards: no guarantee" in done.err
    results = library.load_results(folder)
    without = results.verdict.model_copy(update={"guarantee": None})
    results = results.model_copy(update={"verdict": without})
    with pytest.raises(UsageError, match="made with no guarantee; chosen afterwards"):
        library.plan(recommend=results, guarantee=20, bytes="7MiB", context="4K")
    alone = kvtool("plan-budget", "--guarantee", "5", "-b", "512")
    assert "--guarantee is that of a run" in alone.err
