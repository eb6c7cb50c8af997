"""`plan-budget --bytes B`, then `generate`: at most B is held, whatever the policy."""

import json
import re

import pytest
import yaml

from kvtool.models.load import load_tokenizer
from kvtool.sizes import Budget, bytes_in_words

pytestmark = pytest.mark.few(2)

TEXT = "The old lamp was near the school. The quiet falcon was behind the tower. " * 12
NEW = 8
SIZE = 160 * 1024
POLICIES = [  # one of each kind; `tests/planning/test_forecast.py` has all
    *("h2o", "snapkv(window=8)", "quest", "rocketkv(window=8)", "adakv(window=8)", "h2o+calidrop"),
    *("h2o+ada", "h2o+caote+cam", "streaming(positions=cache)", "h2o+int8", "pyramidkv(window=8)"),
    *("duoattention", "hsa", "kvzip"),
]


@pytest.fixture(scope="module")
def tokens():
    return len(load_tokenizer()[0](TEXT)["input_ids"])


def plan_and_run(kvtool, policy, size, tokens, *flags):
    """The plan, the report of the run, and what it holds."""
    asked = ("--bytes", f"{size}B", "-p", policy, "--context", str(tokens + NEW), "-n", str(NEW))
    done = kvtool("plan-budget", *asked, *flags)
    if done.code:
        return done, None, 0
    ran = kvtool(
        "generate", "-", "--prompt", TEXT, "-n", str(NEW), "-f", "json", stdin=done.out.encode()
    )
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    cache = report["cache"]
    return yaml.safe_load(done.out), report, cache["allocated_bytes"] + cache["state_bytes"]


@pytest.mark.few(6)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_holds_no_more_than_the_bytes_that_were_planned(kvtool, policy, tokens):
    size = SIZE
    plan, report, held = plan_and_run(kvtool, policy, size, tokens)
    if report is None:  # everything is stored, or all that the window needs: the number is reported
        assert plan.code == 2
        size = Budget.parse(re.search(r"hint: --bytes (\S+?)[;\n]", plan.err)[1]).bytes
        told = plan.err
        plan, report, held = plan_and_run(kvtool, policy, size, tokens)
        assert f"{bytes_in_words(held)}\n" in told
        assert size - 1024 < held <= size  # the hint is in words, rounded up
    assert held <= size
    assert plan["totals"]["storage"]["bytes"] == plan["totals"]["bytes"] <= size
    assert report["plan"]["storage"] == report["plan"]["held"] == plan["totals"]["bytes"]
    if report["new_tokens"] == NEW:
        assert held == plan["totals"]["bytes"]
        assert report["cache"]["traffic_bytes"] <= plan["totals"]["traffic"]["bytes"]


@pytest.mark.parametrize(("policy", "new"), [("rocketkv(window=8)", NEW), ("d2o", 0)])
def test_a_share_of_a_profile_holds_the_plan_to_the_byte(kvtool, policy, new, tokens):
    profile = kvtool("profile", "-q", "--samples", "1", "--tokens", "256", "--decode", "4")
    asked = ("--ratio", "20%", "-p", policy, "--context", str(tokens + new), "-n", str(new))
    plan = kvtool("plan-budget", "-", *asked, stdin=profile.out.encode())
    totals = yaml.safe_load(plan.out)["totals"]
    if new:
        done = kvtool(
            "generate", "-", "--prompt", TEXT, "-n", str(new), "-f", "json", stdin=plan.out.encode()
        )
    else:
        done = kvtool(
            "compress",
            "-",
            "--prompt",
            TEXT,
            "--save",
            "a.st",
            "-f",
            "json",
            stdin=plan.out.encode(),
        )
    report = json.loads(done.out)
    held = report["cache"]["allocated_bytes"] + report["cache"]["state_bytes"]
    assert held == totals["storage"]["bytes"] == report["plan"]["held"]
    section = yaml.safe_load(plan.out).get("rocketkv")
    if policy.startswith("rocketkv"):
        assert report["plan"]["rocketkv"]["split_factor"] == section["split_factor"]
        assert sum(report["plan"]["rocketkv"]["stage1_tokens"]) == 4 * section["stage1_tokens"]
    else:
        assert report["plan"]["rocketkv"] is None
        assert report["plan"]["tokens"] == yaml.safe_load(plan.out)["layers"]["tokens"]


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["h2o", "rocketkv(window=8)", "quest"])
def test_a_budget_in_bytes_means_the_same_in_every_command(kvtool, policy, tokens):
    size = {"quest": 1_500_000, "rocketkv(window=8)": 300_000}.get(policy, SIZE)
    given = ("--prompt", TEXT, "-p", policy, "-b", f"{size}B", "-f", "json")
    done = kvtool("generate", *given, "-n", str(NEW))
    cache = json.loads(done.out)["cache"]
    made = json.loads(kvtool("compress", *given, "--save", "a.st").out)["cache"]
    for each in (cache, made):
        assert each["allocated_bytes"] + each["state_bytes"] <= size
    if policy == "quest":
        assert "a token reads 512 pairs of key and value per layer and KV head" in done.err
    else:
        asked = ("--bytes", f"{size}B", "-p", policy, "--context", str(tokens + NEW), "-n", "8")
        plan = yaml.safe_load(kvtool("plan-budget", *asked).out)
        stage1 = [plan["rocketkv"]["stage1_tokens"] - NEW] * 4
        stored = stage1 if policy.startswith("rocketkv") else plan["layers"]["tokens"]
        more = 0 if policy == "h2o" else NEW - 1
        slack = [a + more - b for a, b in zip(stored, cache["kept_per_layer"], strict=True)]
        assert set(slack) <= {0, 1}  # a plan gives out what equal layers leave


def test_bytes_that_everything_exceeds_are_refused_with_the_number(kvtool):
    done = kvtool("generate", "--prompt", TEXT, "-p", "quest", "-b", "64KiB", "-n", "2")
    assert (done.code, done.out) == (2, "")
    assert re.search(r"64KiB is too small: `quest` stores everything, which takes \d+ by", done.err)
