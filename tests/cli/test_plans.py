"""Plans in `generate`, `compress` and `eval`: pipes, files, allocators as flags."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvtool.documents.results import ResultsDocument
from kvtool.models import reference
from kvtool.models.load import load_tokenizer

TEXT = "The old lamp was near the school. The quiet falcon was behind the tower. " * 6
PROMPT = ("--prompt", TEXT)
QUICK = ("-t", "niah", "--lengths", "256", "--depths", "2", "-q", "-f", "json", "--no-plots")


def planned(kvtool, *arguments) -> bytes:
    usual = {"--allocator": "pyramid", "--context": "512"}
    more = [text for flag in usual.items() if flag[0] not in arguments for text in flag]
    done = kvtool("plan-budget", *more, "-q", *arguments)
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


@pytest.mark.parametrize(
    ("way", "command", "flag"),
    [
        ("pipe", "generate", ("-b", "12")),
        ("argument", "compress", ("--allocator", "uniform")),
        ("recipe", "eval", ("-b", "12")),
        ("pipe", "eval", ("--allocator", "uniform")),
    ],
)
def test_a_plan_beside_a_budget_or_an_allocator_is_a_conflict(kvtool, way, command, flag):
    plan = planned(kvtool, "--ratio", "30%", "-p", "h2o")
    Path("plan.yaml").write_bytes(plan)
    Path("mine.yaml").write_text(
        "kind: recipe\nschema_version: 1\npolicy: h2o\nbudget: {plan: plan.yaml}\n"
    )
    source = {"pipe": "-", "argument": "plan.yaml", "recipe": "mine.yaml"}[way]
    more = {"generate": PROMPT, "compress": (*PROMPT, "--save", "a.st"), "eval": ("-t", "niah")}
    stdin = plan if way == "pipe" else b""
    done = kvtool(command, source, *more[command], *flag, stdin=stdin)
    named = {"-b": "--budget 12", "--allocator": "--allocator uniform"}[flag[0]]
    if command == "eval" and flag[0] == "-b":
        named = "--budget"
    assert (done.code, done.out) == (2, "")
    first = done.err.splitlines()[-2]
    assert first.startswith(f"error: {named}")
    where = {"pipe": "<stdin>", "argument": "plan.yaml", "recipe": "mine.yaml: budget.plan"}[way]
    assert f"the plan in `{where}` exclude each other" in first


def test_an_allocator_in_a_recipe_beside_its_plan_is_a_conflict(kvtool):
    Path("plan.yaml").write_bytes(planned(kvtool, "-b", "16"))
    Path("mine.yaml").write_text(
        "kind: recipe\nschema_version: 1\npolicy: h2o\nallocator: uniform\n"
        "budget: {plan: plan.yaml}\n"
    )
    done = kvtool("generate", "mine.yaml", *PROMPT)
    assert (done.code, "`uniform` and a plan exclude each other" in done.err) == (2, True)


def test_a_plan_beside_a_saved_cache_is_a_conflict(kvtool):
    plan = planned(kvtool, "-b", "16", "-p", "h2o")
    run(kvtool, "compress", "-", *PROMPT, "--save", "a.st", "-f", "json", stdin=plan)
    done = kvtool("generate", "-", "--cache", "a.st", stdin=plan)
    assert (done.code, "a plan and --cache exclude each other" in done.err) == (2, True)


def test_a_plan_under_another_policy_says_what_is_held(kvtool):
    plan = planned(kvtool, "-b", "16", "-p", "tova")
    totals = yaml.safe_load(plan)["totals"]
    done = kvtool("generate", "-", *PROMPT, "-p", "roco", "-n", "2", "-f", "json", stdin=plan)
    cache = json.loads(done.out)["cache"]
    held = cache["allocated_bytes"] + cache["state_bytes"]
    assert held > totals["storage"]["bytes"]
    assert (
        "note: the plan's totals are those of `tova`, and this is `roco`: held are "
        f"{held} bytes, not {totals['storage']['bytes']}" in done.err
    )
    size = totals["storage"]["bytes"]
    plan = planned(kvtool, "--bytes", str(size), "-p", "tova")
    done = kvtool("generate", "-", *PROMPT, "-p", "roco", stdin=plan)
    assert (done.code, done.out) == (2, "")
    assert f"are for policy `tova`, and `roco` would hold {held} bytes" in done.err
    done = kvtool("eval", "-", "-p", "roco", *QUICK, stdin=plan)
    assert (done.code, done.out) == (2, "")
    assert f"and `roco` would hold {held} bytes" in done.err


def test_a_plan_in_another_dtype_says_so_or_is_refused(kvtool):
    told = ("--dtype", "bfloat16", "-p", "h2o")
    plan = planned(kvtool, "-b", "16", *told)
    done = kvtool("generate", "-", *PROMPT, "-n", "1", "-f", "json", stdin=plan)
    cache = json.loads(done.out)["cache"]
    held = cache["allocated_bytes"] + cache["state_bytes"]
    assert "note: the plan is for bfloat16, and this run is in float32: held are" in done.err
    assert f"held are {held} bytes, not " in done.err
    plan = planned(kvtool, "--bytes", "64KiB", *told)
    done = kvtool("generate", "-", *PROMPT, "-n", "1", stdin=plan)
    assert (done.code, done.out) == (2, "")
    assert "the plan's 64KiB are for bfloat16, and in float32 the run would hold" in done.err
    assert "hint: --dtype bfloat16, or make the plan anew: kvtool plan-budget .. --dtype flo" in (
        done.err
    )
    more = ("-n", "1", "--dtype", "bfloat16", "-f", "json")
    ran = run(kvtool, "generate", "-", *PROMPT, *more, stdin=plan)
    assert ran["cache"]["allocated_bytes"] + ran["cache"]["state_bytes"] <= 64 * 1024


def test_a_plan_of_a_checkpoint_is_for_its_own_dtype(kvtool):
    """A bfloat16 model planned on a CPU: twice the tokens of float32, with a note."""
    config = json.loads((Path(reference.path()) / "config.json").read_text())
    Path("half").mkdir()
    Path("half/config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    done = kvtool("plan-budget", "-m", "half", "--bytes", "1MiB", "--context", "4K", "-p", "h2o")
    plan = yaml.safe_load(done.out)
    assert plan["model"]["dtype"] == "bfloat16"
    assert "dtype: bfloat16, the checkpoint's own (change: --dtype)" in done.err
    slot = 4 * 2 * (2 * 32 * 2 + 2 * 4)  # layers, heads; K and V, a position and H2O's number
    assert sum(plan["layers"]["tokens"]) == 4 * (2**20 // slot - 1) + 2**20 % slot // (slot // 4)
    bundled = kvtool("plan-budget", "--bytes", "1MiB", "--context", "4K", "-p", "h2o")
    assert yaml.safe_load(bundled.out)["model"]["dtype"] == "float32"
    assert "dtype: float32, in which it would run here" in bundled.err


def edited(plan, **changes):
    """A plan whose layers are changed; `totals` are left out if they are None."""
    data = yaml.safe_load(plan)
    data["layers"] |= {k: v for k, v in changes.items() if k != "totals"}
    if "totals" in changes:
        del data["totals"]
    return yaml.safe_dump(data).encode()


@pytest.mark.parametrize("target", [("-b", "16"), ("--ratio", "10%")])
def test_edited_tokens_are_refused_or_stand_as_they_are(kvtool, target):
    plan = planned(kvtool, *target, "-p", "h2o", "--context", "120", "--allocator", "uniform")
    tokens = yaml.safe_load(plan)["layers"]["tokens"]
    other = [tokens[0] + 9, *tokens[1:]]
    done = kvtool("generate", "-", *PROMPT, stdin=edited(plan, tokens=other))
    assert done.code == 2
    assert f"layers.tokens: they are {sum(other)} together" in done.err
    ids = len(load_tokenizer()[0](TEXT)["input_ids"])
    for more in ({}, {"fractions": None}):
        changed = edited(plan, tokens=other, totals=None, **more)
        ran = run(kvtool, "generate", "-", *PROMPT, "-n", "2", "-f", "json", stdin=changed)
        kept = ran["cache"]["kept_per_layer"]
        if target[0] == "-b":
            assert kept == other
        else:
            assert sum(kept) == sum(other) * ids // 120
            assert kept[0] > kept[1]


def test_edited_stages_are_refused_or_change_the_run(kvtool):
    plan = planned(kvtool, "-b", "32", "-p", "rocketkv(window=8)", "--allocator", "uniform")
    data = yaml.safe_load(plan)

    def of(leave_out=(), **changes):
        section = {k: v for k, v in data["rocketkv"].items() if k not in leave_out} | changes
        return yaml.safe_dump(data | {"rocketkv": section}).encode()

    done = kvtool("generate", "-", *PROMPT, stdin=of(split_factor=0.3))
    assert (done.code, done.out) == (2, "")
    assert "does not agree with `split_factor`" in done.err
    assert "rocketkv.stage1_tokens" in done.err
    changed = of(("stage1_tokens", "prompt_tokens"), split_factor=0.7)
    told = kvtool("generate", "-", *PROMPT, "-n", "2", "-f", "json", stdin=changed)
    ran = json.loads(told.out)
    stage1 = int(512 / 16**0.7)
    assert ran["plan"]["rocketkv"]["split_factor"] == 0.7
    assert ran["plan"]["rocketkv"]["stage1_tokens"] == [stage1] * 4
    assert ran["cache"]["kept_per_layer"] == [stage1 + 1] * 4
    assert "budget: as planned, split factor 0.7, stage 1 keeps" in told.err
    assert "note: the plan's totals are not those of its tokens and stages: held are" in told.err
    assert "split factor 0.7" in told.err.splitlines()[-1]


def test_compress_keeps_the_plan_in_its_file(kvtool):
    plan = planned(kvtool, "-b", "16", "-p", "snapkv(window=4)")
    made = run(kvtool, "compress", "-", *PROMPT, "--save", "a.st", "-f", "json", "-q", stdin=plan)
    assert sum(made["cache"]["kept_per_layer"]) == 64
    assert len(set(made["cache"]["kept_per_layer"])) > 1
    went_on = run(kvtool, "generate", "--cache", "a.st", "-n", "3", "-f", "json", "-q")
    kept = [tokens + 2 for tokens in made["cache"]["kept_per_layer"]]
    assert went_on["cache"]["kept_per_layer"] == kept


def test_eval_says_where_samples_hold_more_than_was_planned(kvtool):
    arguments = ["eval", "-", "-p", "h2o", *(flag for flag in QUICK if flag != "-q"), "--dry-run"]
    notes = []
    for context in ("64", "512"):
        plan = planned(kvtool, "--ratio", "50%", "-p", "h2o", "--context", context)
        done = kvtool(*arguments, stdin=plan)
        assert done.code == 0, done.err
        notes.append([line for line in done.err.splitlines() if "bytes are held" in line])
    (told,), quiet = notes
    assert told.startswith("h2o@50%,plan: after a prompt of 2")
    assert told.endswith(" are for 64 and 0")
    assert quiet == []


def test_eval_says_where_more_rows_run_than_were_planned(kvtool):
    notes = []
    for batch in ("2", "1"):
        plan = planned(kvtool, "-b", "64", "-p", "h2o", "--context", "4096", "--batch", batch)
        task = ("--set", "eval.tasks.0.batch=2", "--set", "eval.tasks.0.lengths=256")
        done = kvtool("eval", "-", "-p", "h2o", "-t", "speed", *task, "--dry-run", stdin=plan)
        assert done.code == 0, done.err
        notes.append([line for line in done.err.splitlines() if "bytes are held" in line])
    quiet, (told,) = notes
    assert quiet == []
    assert " in 2 rows, " in told
    assert told.endswith(" in 1 row")


@pytest.mark.exhaustive
def test_eval_reports_what_was_planned(kvtool):
    plan = planned(kvtool, "--ratio", "25%")
    told = run(kvtool, "eval", "-", "-p", "h2o,streaming", *QUICK, "-o", "run", stdin=plan)
    results = ResultsDocument(**told)
    names = [each.name for each in results.variants]
    assert names == ["full", "h2o@25%,plan", "streaming@25%,plan"]
    cost = results.of("h2o@25%,plan", "niah").cost
    assert cost.kv_bytes == pytest.approx(cost.full_bytes / 4, rel=0.05)
    again = ResultsDocument(**run(kvtool, "eval", "run/recipe.lock.yaml", *QUICK[6:], "-o", "two"))
    values = [(result.variant, result.value) for result in results.results]
    assert [(result.variant, result.value) for result in again.results] == values
    rescored = ResultsDocument(**run(kvtool, "eval", "--rescore", "run", *QUICK[6:]))
    assert [(result.variant, result.value) for result in rescored.results] == values


def test_a_recipe_names_a_plan_beside_it(kvtool):
    Path("sub").mkdir()
    Path("sub/plan.yaml").write_bytes(planned(kvtool, "-b", "16"))
    Path("sub/mine.yaml").write_text(
        "kind: recipe\nschema_version: 1\npolicy: h2o\nbudget: {plan: plan.yaml}\n"
    )
    told = run(kvtool, "generate", "sub/mine.yaml", *PROMPT, "-n", "1", "-f", "json", "-q")
    assert sum(told["cache"]["kept_per_layer"]) == 64
    assert len(set(told["cache"]["kept_per_layer"])) > 1


def test_the_flag_is_the_modifier(kvtool):
    given = (*PROMPT, "-b", "12", "-n", "4", "-f", "json")
    flag = run(kvtool, "generate", *given, "-p", "h2o", "--allocator", "d2o(norm=minmax)")
    modifier = run(kvtool, "generate", *given, "-p", "h2o+d2o-alloc(norm=minmax)")
    assert flag["policy"] == modifier["policy"] == "h2o+d2o-alloc(norm=minmax)"
    assert flag["cache"] == modifier["cache"]
    assert sum(flag["cache"]["kept_per_layer"]) == 48


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-p", "h2o+pyramid", "--allocator", "d2o"], "has the allocator `pyramid` already"),
        (["-p", "streaming", "--allocator", "ada"], "compete by their scores"),
        (["-p", "h2o", "--allocator", "optimal"], "which a plan holds"),
        (["-p", "h2o", "--allocator", "curves"], "a file, which a plan is made from"),
        (["--allocator", "pyramid"], "--allocator needs a policy"),
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
    assert (done.code, "`<stdin>` is empty" in done.err) == (2, True)
    done = kvtool(
        "generate", "-", *PROMPT, "-p", "streaming(sinks=12)", stdin=yaml.safe_dump(plan).encode()
    )
    assert (done.code, "is not above sinks 12" in done.err) == (2, True)


def by_heads(kvtool) -> dict:
    """A plan whose layers have two heads of unequal budgets each."""
    plan = yaml.safe_load(planned(kvtool, "-b", "24", "-p", "h2o", "--allocator", "uniform"))
    plan.pop("totals")
    count = len(plan["layers"]["tokens"])
    plan["layers"] |= {"heads": [[16, 32], [40, 8]] * (count // 2), "fractions": None}
    Path("plan.yaml").write_text(yaml.safe_dump(plan))
    return plan


def test_commands_run_a_plan_by_heads(kvtool):
    heads = by_heads(kvtool)["layers"]["heads"]
    quiet = ("-f", "json", "-q")
    done = run(kvtool, "generate", "plan.yaml", *PROMPT, "-n", "4", *quiet)
    assert (done["policy"], done["plan"]["tokens"]) == ("h2o", [24] * len(heads))
    assert done["cache"]["kept_per_layer"] == [max(own) for own in heads]  # as wide as the widest
    slots = sum(map(sum, heads)) + 2 * len(heads)  # one for the next token
    assert done["cache"]["allocated_bytes"] == slots * 2 * 32 * 4
    held = done["cache"]["allocated_bytes"] + done["cache"]["state_bytes"]
    assert held == done["plan"]["held"]
    dry = kvtool("generate", "plan.yaml", *PROMPT, "-n", "4", "--dry-run", "-q").out
    said = yaml.safe_load(dry)["memory"]
    assert said["kv_bytes"] + said["state_bytes"] == held
    saved = run(kvtool, "compress", "plan.yaml", *PROMPT, "--save", "a.st", *quiet)
    assert saved["cache"]["kv_bytes"] == sum(map(sum, heads)) * 2 * 32 * 4
    answer = run(kvtool, "generate", "--cache", "a.st", "--prompt", " The lamp", "-n", "3", *quiet)
    assert answer["cache"]["allocated_bytes"] == done["cache"]["allocated_bytes"]
    results = ResultsDocument(**run(kvtool, "eval", "plan.yaml", *QUICK))
    cost = results.of("h2o@24,plan", "niah").cost
    assert cost.kv_bytes == sum(map(sum, heads)) * 2 * 32 * 4


@pytest.mark.parametrize(
    ("command", "policy", "told"),
    [
        ("generate", "h2o+ada", "the KV heads of policy `h2o+ada` have no budgets of their own"),
        ("compress", "quest", "the KV heads of policy `quest` have no budgets of their own"),
        ("eval", "pyramidinfer", "the KV heads of policy `pyramidinfer` have no budgets of their"),
    ],
)
def test_policies_of_equal_heads_refuse_a_plan_by_heads(kvtool, command, policy, told):
    by_heads(kvtool)
    more = {"generate": PROMPT, "compress": (*PROMPT, "--save", "a.st"), "eval": ("-t", "niah")}
    done = kvtool(command, "plan.yaml", "-p", policy, *more[command], "--dry-run", "-q")
    error, hint = done.err.splitlines()
    assert (done.code, done.out) == (2, "")
    assert told in error
    assert hint == "hint: --allocator optimal plans layers alone"


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


@pytest.mark.exhaustive
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
