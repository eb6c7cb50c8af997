"""Plans in `generate`, `compress` and `eval`: pipes, files, allocators as flags."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvtool.documents.results import ResultsDocument

TEXT = "The old lamp was near the school. The quiet falcon was behind the tower. " * 6
PROMPT = ("--prompt", TEXT)
QUICK = ("-t", "niah", "--lengths", "256", "--depths", "2", "-q", "-f", "json", "--no-plots")


def planned(kvtool, *arguments) -> bytes:
    done = kvtool("plan-budget", "--allocator", "pyramid", "--context", "512", "-q", *arguments)
    assert done.code == 0, done.err
    return done.out.encode()


def run(kvtool, *arguments, stdin=b"") -> dict:
    done = kvtool(*arguments, stdin=stdin)
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_generate_takes_a_plan_from_a_pipe_and_from_a_file(kvtool):
    plan = planned(kvtool, "--ratio", "30%", "-p", "h2o")
    piped = run(kvtool, "generate", "-", *PROMPT, "-n", "4", "-f", "json", "-q", stdin=plan)
    kept = piped["cache"]["kept_per_layer"]
    tokens = piped["prompt_tokens"] * 30 // 100
    assert sum(kept) == tokens * 4
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) > 1
    assert (piped["policy"], piped["budget"]) == ("h2o", "30%")
    Path("plan.yaml").write_bytes(plan)
    filed = run(kvtool, "generate", "plan.yaml", *PROMPT, "-n", "4", "-f", "json", "-q")
    assert filed["cache"] == piped["cache"]
    other = run(kvtool, "generate", "plan.yaml", *PROMPT, "-p", "tova", "-n", "4", "-f", "json")
    assert other["policy"] == "tova"


def test_a_flag_goes_before_the_plan(kvtool):
    plan = planned(kvtool, "--ratio", "30%", "-p", "h2o")
    flat = run(kvtool, "generate", "-", *PROMPT, "-b", "12", "-n", "2", "-f", "json", stdin=plan)
    assert flat["cache"]["kept_per_layer"] == [12] * 4


def test_compress_keeps_the_plan_in_its_file(kvtool):
    plan = planned(kvtool, "-b", "16", "-p", "snapkv(window=4)")
    made = run(kvtool, "compress", "-", *PROMPT, "--save", "a.st", "-f", "json", "-q", stdin=plan)
    assert sum(made["cache"]["kept_per_layer"]) == 64
    assert len(set(made["cache"]["kept_per_layer"])) > 1
    went_on = run(kvtool, "generate", "--cache", "a.st", "-n", "3", "-f", "json", "-q")
    kept = [tokens + 2 for tokens in made["cache"]["kept_per_layer"]]
    assert went_on["cache"]["kept_per_layer"] == kept


def test_eval_reports_what_was_planned(kvtool):
    plan = planned(kvtool, "--ratio", "25%")
    told = run(kvtool, "eval", "-", "-p", "h2o,streaming", *QUICK, "-o", "run", stdin=plan)
    results = ResultsDocument(**told)
    assert [arm.name for arm in results.arms] == ["full", "h2o@25%,plan", "streaming@25%,plan"]
    cost = results.of("h2o@25%,plan", "niah").cost
    assert cost.kv_bytes == pytest.approx(cost.full_bytes / 4, rel=0.05)
    again = ResultsDocument(**run(kvtool, "eval", "run/recipe.lock.yaml", *QUICK[6:], "-o", "two"))
    values = [(result.arm, result.value) for result in results.results]
    assert [(result.arm, result.value) for result in again.results] == values
    rescored = ResultsDocument(**run(kvtool, "eval", "--rescore", "run", *QUICK[6:]))
    assert [(result.arm, result.value) for result in rescored.results] == values


def test_a_recipe_names_a_plan_beside_it(kvtool):
    Path("sub").mkdir()
    Path("sub/plan.yaml").write_bytes(planned(kvtool, "-b", "16"))
    Path("sub/mine.yaml").write_text(
        "kind: recipe\nschema_version: 1\npolicy: h2o\nbudget: {plan: plan.yaml}\n"
    )
    told = run(kvtool, "generate", "sub/mine.yaml", *PROMPT, "-n", "1", "-f", "json", "-q")
    assert sum(told["cache"]["kept_per_layer"]) == 64
    assert len(set(told["cache"]["kept_per_layer"])) > 1


@pytest.mark.parametrize("allocator", ["pyramid", "d2o(norm=minmax)"])
def test_the_flag_is_the_modifier(kvtool, allocator):
    name = {"pyramid": "pyramid", "d2o(norm=minmax)": "d2o-alloc(norm=minmax)"}[allocator]
    flag = run(
        kvtool, "generate", *PROMPT, "-p", "h2o", "--allocator", allocator, "-b", "12", "-f", "json"
    )
    modifier = run(kvtool, "generate", *PROMPT, "-p", f"h2o+{name}", "-b", "12", "-f", "json")
    assert flag["policy"] == modifier["policy"] == f"h2o+{name}"
    assert flag["cache"] == modifier["cache"]
    assert sum(flag["cache"]["kept_per_layer"]) == 48


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-p", "h2o+pyramid", "--allocator", "d2o"], "has the allocator `pyramid` already"),
        (["-p", "streaming", "--allocator", "ada"], "compete by attention scores"),
        (["-p", "h2o+ada", "--allocator", "duo"], "has the allocator `ada` already"),
        (["-p", "h2o", "--allocator", "optimal"], "which a plan holds"),
        (["-p", "h2o", "--allocator", "piramid"], "did you mean `pyramid`?"),
        (["--allocator", "pyramid"], "--allocator needs a policy"),
        (["-p", "full", "--allocator", "pyramid"], "keeps everything"),
    ],
)
def test_allocators_that_cannot_be(kvtool, arguments, told):
    done = kvtool("generate", *PROMPT, "-b", "12", *arguments)
    assert done.code == 2
    assert told in done.err


def test_plans_that_cannot_be(kvtool):
    plan = yaml.safe_load(planned(kvtool, "-b", "16"))
    done = kvtool("generate", "-", *PROMPT, stdin=yaml.safe_dump(plan).encode())
    assert (done.code, "names no policy" in done.err) == (2, True)
    wrong = plan | {"model": plan["model"] | {"config_hash": "0" * 64}}
    done = kvtool("generate", "-", *PROMPT, "-p", "h2o", stdin=yaml.safe_dump(wrong).encode())
    assert (done.code, "was made for model `reference`" in done.err) == (2, True)
    short = plan | {"layers": plan["layers"] | {"tokens": [3]}}
    done = kvtool("generate", "-", *PROMPT, "-p", "h2o", stdin=yaml.safe_dump(short).encode())
    assert done.code == 2
    assert "<stdin>:" in done.err
    done = kvtool("generate", "-", *PROMPT, "-p", "h2o", stdin=b"")
    assert (done.code, "stdin is empty" in done.err) == (2, True)
    done = kvtool(
        "generate", "-", *PROMPT, "-p", "streaming(sinks=12)", stdin=yaml.safe_dump(plan).encode()
    )
    assert (done.code, "is not above sinks 12" in done.err) == (2, True)


def pipeline(folder, *commands) -> subprocess.CompletedProcess:
    """Run commands as a shell pipes them, where a failing one fails the whole."""
    line = " | ".join(f"{sys.executable} -m kvtool.cli.main {command}" for command in commands)
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_profile_plan_and_eval_make_one_pipe(tmp_path):
    done = pipeline(
        tmp_path,
        "profile -q --samples 1 --tokens 256 --decode 8",
        "plan-budget - --ratio 20% -q",
        "eval - -p h2o -t niah --lengths 256 --depths 2 -q -f json --no-plots",
    )
    assert (done.returncode, done.stderr) == (0, "")
    results = ResultsDocument(**json.loads(done.stdout))
    cost = results.of("h2o@20%,plan", "niah").cost
    assert cost.kv_bytes == pytest.approx(cost.full_bytes / 5, rel=0.12)


@pytest.mark.parametrize(
    ("commands", "told"),
    [
        (("profile -q --metrics x", "plan-budget - --ratio 20% -q"), "no metric `x`"),
        (("plan-budget --ratio 20% -q", "eval - -q -t nia -p h2o"), "did you mean `niah`?"),
        (("plan-budget --ratio 2 -q", "eval - -q -t niah -p h2o"), "ratio"),
    ],
)
def test_a_broken_stage_fails_the_pipe(tmp_path, commands, told):
    done = pipeline(tmp_path, *commands)
    assert done.returncode != 0
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
