"""`--device-memory` of dry runs, and `-b auto`."""

import json

import pytest
import yaml

import kvtool as package
from kvtool.errors import UsageError

PROMPT = "The code is 12. " * 200
LEAST = ("--prompt", PROMPT, "-p", "h2o", "-n", "2")
EVAL = ("eval", "-t", "niah", "-p", "h2o", "--lengths", "512", "--depths", "1")
EVAL += ("--limit", "1", "--no-plots", "-o", "run", "-f", "json")


@pytest.fixture
def free(monkeypatch):
    """Say how much memory is free."""

    def say(size):
        monkeypatch.setattr("kvtool.models.placement._free_ram", lambda: size)

    return say


@pytest.mark.parametrize(
    ("command", "flag"), [("generate", "--memory"), ("compress", "--device-memory")]
)
def test_a_dry_run_splits_up_the_memory_of_another_machine(kvtool, command, flag):
    more = () if command == "generate" else ("--save", "a.safetensors")
    done = kvtool(command, *LEAST, *more, "-b", "64", "--dry-run", flag, "1GiB")
    told = yaml.safe_load(done.out)
    assert (done.code, told["device"], told["dtype"]) == (0, "cuda", "auto")
    assert told["memory"]["fits"] is True
    rows = dict(line.rsplit("  ", 1) for line in done.err.splitlines() if "  " in line)
    rows = {name.strip(): size.strip() for name, size in rows.items()}
    assert rows["weights"].endswith("MiB")
    assert rows["memory"] == "1.0 GiB"
    assert "memory: fits, " in done.err


def test_what_would_fit_fits(kvtool):
    given = ("generate", *LEAST, "-b", "64", "--dry-run", "--device-memory", "4500KiB")
    done = kvtool(*given)
    assert "does not fit: " in done.err
    flags = done.err.split("what would: ")[1].split(" (")[0].split()
    done = kvtool(*given, *flags)
    assert "memory: fits, " in done.err


@pytest.mark.parametrize("command", ["profile", "eval"])
def test_other_commands_count_with_it(kvtool, command):
    given = ("profile",) if command == "profile" else (*EVAL, "-b", "64")
    done = kvtool(*given, "--dry-run", "--memory", "1MiB")
    assert done.code == 0
    assert "does not fit" in done.err
    assert " too much" in done.err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            ("generate", *LEAST, "-b", "64", "--memory", "1GiB"),
            "goes with --dry-run, -b auto or -p auto",
        ),
        (("profile", "--memory", "1GiB"), "--device-memory goes with --dry-run"),
        (
            ("generate", *LEAST, "--dry-run", "--memory", "1GiB", "--device-memory", "1GiB"),
            "are the same here; keep one",
        ),
        ((*EVAL, "-b", "64", "--memory", "1GiB"), "goes with --dry-run, -b auto or -p auto"),
        ((*EVAL, "-b", "auto", "--shared-prefill"), "and --shared-prefill holds several"),
        (("generate", "--prompts", "a.jsonl", "-p", "h2o", "-b", "auto"), "goes with one prompt"),
    ],
)
def test_what_goes_not_together_is_refused(kvtool, given, told):
    done = kvtool(*given)
    assert done.code == 2
    assert told in done.err


def test_auto_is_bytes_of_what_is_free(kvtool, free):
    free(12 * 2**20)
    done = kvtool("generate", *LEAST, "-b", "auto:50%", "--prefill", "block", "-f", "json")
    assert done.code == 0
    chosen = json.loads(done.out)["budget"]
    note = f"budget: {chosen}, 50% of what weights and reading the prompt leave"
    assert f"{note} (weights " in done.err
    assert "MiB; 12.0 MiB free on cpu)" in done.err
    again = kvtool("generate", *LEAST, "-b", chosen, "--prefill", "block", "-f", "json")
    assert json.loads(again.out)["token_ids"] == json.loads(done.out)["token_ids"]


def test_a_named_memory_takes_the_place_of_what_is_free(kvtool, free):
    free(2**40)
    done = kvtool("generate", *LEAST, "-b", "auto", "--memory", "12MiB", "--prefill", "block")
    assert "12.0 MiB free on cpu" in done.err
    assert "so nothing of it is evicted" not in done.err
    done = kvtool("generate", *LEAST, "-b", "auto", "--dry-run")
    assert "so nothing of it is evicted" in done.err
    assert yaml.safe_load(done.out)["budget"].endswith("MiB")


def test_a_plan_brings_its_own_budget(kvtool):
    plan = kvtool("plan-budget", "-b", "64", "--context", "1K", "-p", "h2o", "-o", "plan.yaml")
    assert plan.code == 0
    done = kvtool("generate", "plan.yaml", "--prompt", PROMPT, "-b", "auto")
    assert done.code == 2
    assert "--budget auto and the plan in `plan.yaml` exclude each other" in done.err


def test_a_run_holds_the_number_and_keeps_it(kvtool, free):
    free(12 * 2**20)
    done = kvtool(*EVAL, "-b", "64,auto:50%")
    assert done.code == 0
    names = [each["name"] for each in json.loads(done.out)["variants"]]
    (chosen,) = {name.partition("@")[2] for name in names} - {"", "64"}
    assert chosen.endswith("KiB")
    with open("run/recipe.lock.yaml") as lock:
        assert yaml.safe_load(lock)["budget"] == ["64", chosen]
    free(20 * 2**20)
    again = kvtool(*EVAL, "-b", "64,auto:50%")
    assert f"budget: {chosen}, as the run in run has it" in again.err
    assert "resumed 3/3" in again.err
    anew = kvtool(*EVAL, "-b", "64,auto:50%", "--overwrite")
    assert f"budget: {chosen}" not in anew.err


def test_python_takes_both(free):
    free(2**40)
    done = package.generate(
        None, PROMPT, "h2o", "auto", device_memory="12MiB", prefill="block", max_new_tokens=2
    )
    assert str(done.budget).endswith("KiB")
    with pytest.raises(UsageError, match="goes with --dry-run, -b auto or -p auto"):
        package.generate(None, PROMPT, "h2o", 64, device_memory="12MiB")


def test_a_plan_for_more_memory_than_is_free_is_told_and_with_strict_refused(kvtool, free):
    """A plan of one policy knows its device as one of ways does."""
    free(30 * 2**20)
    made = kvtool(
        "plan-budget", "-p", "h2o", "--memory", "300MiB", "--context", "1K", "-o", "p.yaml"
    )
    assert made.code == 0, made.err
    run = ["generate", "p.yaml", "--prompt", "The secret code", "-n", "2", "--no-progress"]
    done = kvtool(*run, "--strict")
    assert done.code == 2
    assert "the plan is for a memory of 300.0 MiB, and 30.0 MiB are free on cpu" in done.err
    told = kvtool(*run)
    assert told.code == 0, told.err
    assert "the plan is for a memory of 300.0 MiB, and 30.0 MiB are free on cpu" in told.err
