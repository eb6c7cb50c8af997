"""`kvtool plan-budget`: sessions as people type them."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from kvtool.documents.plan import PlanDocument
from kvtool.documents.source import read_source
from kvtool.models import reference
from tests.cli.test_startup import ended
from tests.models_for_tests import FAMILIES
from tests.planning.documents import F, of_heads, profile

PROFILE = profile(f_variance=F).to_yaml()
ERRORS = [[0.5, 0.2, 0.1], [0.4, 0.3, 0.2], [0.1, 0.05, 0.01], [0.9, 0.8, 0.1]]


@pytest.fixture(autouse=True)
def files(kvtool, tmp_path):
    """A profile, and a model without weights and tokenizer."""
    Path("profile.yaml").write_text(PROFILE)
    Path("both.yaml").write_text(profile(losses=ERRORS, f_variance=F).to_yaml())
    Path("model").mkdir()
    shutil.copy(Path(reference.path()) / "config.json", "model/config.json")


def planned(kvtool, *arguments, **more):
    done = kvtool("plan-budget", *arguments, **more)
    assert done.code == 0, done.err
    return yaml.safe_load(done.out)


def test_tokens_for_a_model_without_weights(kvtool):
    plan = planned(kvtool, "-m", "model", "-b", "512", "--context", "32K", "--dtype", "bfloat16")
    assert list(plan) == [
        "kind",
        "schema_version",
        "model",
        "target",
        "layers",
        "rocketkv",
        "totals",
    ]
    assert plan["target"] == {"tokens": 512, "context": 32768, "max_new_tokens": 0, "batch": 1}
    assert plan["layers"]["tokens"] == [512] * 4
    assert plan["layers"]["allocator"] == "uniform"
    rocketkv = plan["rocketkv"]
    assert (rocketkv["compression_ratio"], rocketkv["split_factor"]) == (64, 0.56)
    assert (rocketkv["stage1_tokens"], rocketkv["prompt_tokens"]) == (3191, 3191)
    assert (rocketkv["page_size"], rocketkv["top_k"]) == (3, 256)
    assert rocketkv["head_dims"] == 15  # int(32 * 3 / 6.2324)
    assert rocketkv["traffic"]["paper"] == 1 / 64
    assert rocketkv["storage"]["paper"] == pytest.approx(0.175416, abs=5e-7)
    held, read = 2052 * (256 + 2 * 4), 2052 * 256  # a slot more, positions; no policy is named
    assert plan["totals"] == {
        "tokens": 2048,
        "bytes": 2048 * 256,
        "share_of_full": 512 / 32768,
        "storage": {"bytes": held, "share_of_full": held / (4 * 32768 * 256)},
        "traffic": {"bytes": read, "share_of_full": read / (4 * 32769 * 256)},
    }


def test_a_profile_by_file_and_by_pipe(kvtool):
    plan = planned(kvtool, "profile.yaml", "--ratio", "20%", "--min-tokens", "16")
    assert plan["layers"]["allocator"] == "d2o"
    assert plan["layers"]["tokens"] == [243, 243, 180, 134]
    assert plan["target"] == {"ratio": 0.2, "context": 1000, "max_new_tokens": 0, "batch": 1}
    piped = planned(kvtool, "-", "--ratio", "0.2", "--min-tokens", "16", stdin=PROFILE.encode())
    assert piped == plan


def test_what_was_chosen_is_said(kvtool):
    done = kvtool("plan-budget", "--ratio", "20%")
    assert done.err.splitlines() == [
        "model: reference (bundled; choose another with --model)",
        "dtype: float32, in which it would run here (change: --dtype)",
        "context: 8192 tokens, the model's longest (change: --context)",
    ]
    assert kvtool("plan-budget", "--ratio", "20%", "-q").err == ""
    done = kvtool("plan-budget", "profile.yaml", "--ratio", "20%")
    assert done.err == "context: 1000 tokens, as profiled (change: --context)\n"


def test_a_longest_context_that_no_text_has_is_refused(kvtool):
    profile = yaml.safe_load(PROFILE)
    del profile["data"]
    profile["model"]["trained_length"] = 99999999999
    given = {"stdin": yaml.safe_dump(profile).encode()}
    done = kvtool("plan-budget", "-", "--ratio", "20%", "--allocator", "uniform", **given)
    assert (done.code, done.out) == (2, "")
    told, hint = done.err.splitlines()
    assert told.endswith(
        "gives 99999999999 tokens as its longest context, and up to 2147483647 can be planned for"
    )
    assert hint == "hint: --context 32K"
    asked = ("--ratio", "20%", "--allocator", "uniform", "--context", "1K")
    assert kvtool("plan-budget", "-", *asked, **given).code == 0


def test_a_plan_in_a_file_reads_back(kvtool):
    for name in ("plan.yaml", "plan.json"):
        done = kvtool("plan-budget", "both.yaml", "--ratio", "1/3", "-o", name)
        assert (done.code, done.out) == (0, "")
        assert done.err.splitlines()[-1] == f"wrote {name}"
    plans = [
        read_source(name, option="plan").validate(PlanDocument)
        for name in ("plan.yaml", "plan.json")
    ]
    assert plans[0] == plans[1]
    assert sum(plans[0].layers.tokens) == 333 * 4


def test_the_same_request_gives_the_same_bytes(kvtool):
    made = {kvtool("plan-budget", "both.yaml", "--bytes", "400KiB").out for _ in range(2)}
    assert len(made) == 1


@pytest.mark.parametrize(
    ("allocator", "tokens"),
    [
        ("d2o-reciprocal", [560, 224, 8, 8]),
        ("D2O(norm=minmax)", [269, 268, 164, 99]),
        ("pyramid", [382, 261, 139, 18]),  # 8 each, and a line from 374.4 to 9.6
        ("optimal", [256, 160, 128, 256]),
    ],
)
def test_allocators(kvtool, allocator, tokens):
    plan = planned(kvtool, "both.yaml", "--ratio", "20%", "--allocator", allocator)
    assert plan["layers"]["tokens"] == tokens
    assert plan["layers"]["allocator"] == allocator.lower()


def test_published_curves_split_a_budget(kvtool):
    Path("curves.json").write_text('{"0.1": [0.1, 0.1, 0.1, 0.1], "0.3": [0.5, 0.1, 0.3, 0.3]}')
    plan = planned(kvtool, "-m", "model", "--ratio", "20%", "--curves", "curves.json")
    weights = [0.3, 0.1, 0.2, 0.2]  # in the middle
    assert plan["layers"]["allocator"] == "curves"
    total, n = sum(plan["layers"]["tokens"]), plan["target"]["context"]
    assert total == n // 5 * 4
    assert plan["layers"]["tokens"] == pytest.approx([w * total / 0.8 for w in weights], abs=1)
    Path("plan.json").write_text(json.dumps(plan))
    read = read_source("plan.json", option="plan").validate(PlanDocument)
    assert read.layers.tokens == plan["layers"]["tokens"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--curves", "short.json", "--allocator", "pyramid"], "so does --allocator pyramid"),
        (["--allocator", "curves"], "allocator `curves` needs --curves FILE"),
    ],
)
def test_curves_that_do_not_fit_are_refused(kvtool, arguments, told):
    Path("short.json").write_text('{"0.2": [0.1, 0.1, 0.4]}')
    done = kvtool("plan-budget", "-m", "model", "-b", "64", *arguments)
    assert done.code == 2
    assert told in done.err


def lossy(**changes):
    """A profile of four layers, the third of which is the one that matters."""
    losses = [[0.02, 0.01], [0.01, 0.0], [3.0, 2.0], [0.01, 0.0]]
    return profile(losses=losses, budgets=(64, 256), f_variance=F, **changes)


def test_the_loss_of_a_plan_is_told_and_written(kvtool):
    Path("lossy.yaml").write_text(lossy().to_yaml())
    asked = ("plan-budget", "lossy.yaml", "-b", "200", "-p", "h2o", "--allocator", "optimal")
    done = kvtool(*asked)
    assert done.code == 0
    plan = yaml.safe_load(done.out)
    assert plan["layers"]["tokens"] == [64, 64, 608, 64]
    equal = (0.02 - 0.01 * 136 / 192) + 2 * 0.01 * (1 - 136 / 192) + 3.0 - 136 / 192
    planned = 0.04 + 2.0 * (1 - (608 - 256) / (1000 - 256))
    assert plan["predicted_loss"] == {
        "equal": pytest.approx(equal),
        "planned": pytest.approx(planned),
        "standard_error": 0.0,
    }
    assert f"predicted loss: {planned:.3g} nats per token, {equal:.3g} with equal" in done.err
    even = yaml.safe_load(kvtool(*asked[:-1], "uniform").out)
    assert even["predicted_loss"]["planned"] == pytest.approx(equal)


@pytest.mark.parametrize(
    ("policy", "allocator"), [(("-p", "h2o"), "optimal"), (("-p", "roco"), "d2o")]
)
def test_losses_of_the_policy_split_a_budget_unless_another_way_is_asked_for(
    kvtool, policy, allocator
):
    Path("lossy.yaml").write_text(lossy().to_yaml())
    plan = planned(kvtool, "lossy.yaml", "-b", "200", *policy)
    assert plan["layers"]["allocator"] == allocator
    asked = planned(kvtool, "lossy.yaml", "-b", "200", *policy, "--allocator", allocator)
    assert asked == plan
    even = planned(kvtool, "lossy.yaml", "-b", "200", *policy, "--allocator", "uniform")
    assert even["layers"]["tokens"] == [200] * 4


READER = [[[0.01, 0.0], [0.01, 0.0]]] * 2 + [[[0.1, 0.05], [3.0, 2.0]]] + [[[0.02, 0.01]] * 2]
"""Losses of KV heads at 64 and 256 tokens; one head of the third layer is the one that matters."""

BY_HEAD = ("-b", "200", "--allocator", "optimal(heads=true)")


def test_a_plan_by_heads_is_told_and_written(kvtool):
    Path("heads.yaml").write_text(lossy(heads=of_heads(READER)).to_yaml())
    done = kvtool("plan-budget", "heads.yaml", "-p", "h2o", *BY_HEAD)
    assert done.code == 0, done.err
    plan = yaml.safe_load(done.out)
    # of 1600 tokens in eight heads of 64 or more: 936 to the reader, the rest to its neighbour
    assert plan["layers"]["heads"] == [[64, 64], [64, 64], [216, 1000], [64, 64]]
    assert plan["layers"]["tokens"] == [64, 64, 608, 64]
    assert plan["layers"]["allocator"] == "optimal(heads=true)"
    part = 136 / 192
    equal = 4 * 0.01 * (1 - part) + 0.1 - 0.05 * part + 3.0 - part + 2 * (0.02 - 0.01 * part)
    best = 4 * 0.01 + 0.1 - 0.05 * 152 / 192 + 2 * 0.02
    loss = {"equal": equal, "planned": best, "standard_error": 0.0}
    assert plan["predicted_loss"] == {name: pytest.approx(each) for name, each in loss.items()}
    assert f"predicted loss: {best:.3g} nats per token, {equal:.3g} with equal" in done.err
    assert "it adds up KV heads cut one by one, so compare" in done.err
    text = kvtool("plan-budget", "heads.yaml", "-p", "h2o", *BY_HEAD, "-f", "text").out
    assert "216 to 1,000" in text
    layers = planned(kvtool, "heads.yaml", *BY_HEAD[:-1], "optimal")["layers"]
    assert "heads" not in layers


def test_heads_stay_equal_within_the_noise_and_that_is_said(kvtool):
    one = [[[0.0, 0.0]] * 2] * 2 + [[[4.0, 2.0]] * 2] + [[[0.0, 0.0]] * 2]
    other = [[[1.0, 0.1]] * 2] * 2 + [[[0.0, 0.0]] * 2] + [[[1.0, 0.1]] * 2]
    Path("noisy.yaml").write_text(lossy(heads=of_heads(one, other)).to_yaml())
    done = kvtool("plan-budget", "noisy.yaml", "-p", "h2o", *BY_HEAD)
    plan = yaml.safe_load(done.out)
    assert plan["layers"]["tokens"] == [200] * 4
    assert "heads" not in plan["layers"]
    assert "with equal budgets: no other split gains beyond noise" in done.err


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("quest", "policy `quest` have no budgets of their own: it reads as many tokens in every"),
        ("sirllm", "the KV heads of policy `sirllm` have no budgets of their own"),
    ],
)
def test_a_policy_of_equal_heads_has_no_plan_by_heads(kvtool, policy, told):
    losses = lossy(heads=of_heads(READER)).metrics.answer_loss.model_copy(update={"policy": policy})
    Path("heads.yaml").write_text(profile(answer_loss=losses).to_yaml())
    done = kvtool("plan-budget", "heads.yaml", "-q", "-p", policy, *BY_HEAD)
    assert (done.code, done.out) == (2, "")
    error, hint = done.err.splitlines()
    assert told in error
    assert hint == "hint: --allocator optimal plans layers alone"


@pytest.mark.parametrize("allocator", ["optimal", "optimal(heads=true)"])
def test_bytes_are_split_by_measured_losses(kvtool, allocator):
    Path("heads.yaml").write_text(lossy(heads=of_heads(READER)).to_yaml())
    slot = 2 * (2 * 32 * 2 + 2 * 4)  # in both heads: key and value, position and sum
    size = 4 * 201 * slot
    asked = ("heads.yaml", "-p", "h2o", "--allocator", allocator, "--bytes")
    plan = planned(kvtool, *asked, f"{size}B")
    assert (sum(plan["layers"]["tokens"]), plan["totals"]["bytes"]) == (800, size)
    assert max(plan["layers"]["tokens"]) == 608
    done = kvtool("plan-budget", "-q", *asked, f"{4 * 65 * slot - 1}B")
    assert done.code == 2
    told = "64 tokens in every layer (the smallest budget whose loss the profile holds) take"
    assert told in done.err


def test_a_profile_without_heads_has_no_plan_by_heads(kvtool):
    Path("lossy.yaml").write_text(lossy().to_yaml())
    done = kvtool("plan-budget", "lossy.yaml", "-q", "-p", "h2o", *BY_HEAD)
    assert (done.code, done.err.splitlines()) == (
        2,
        [
            "error: allocator `optimal(heads=true)` needs losses of KV heads, which the profile "
            "lacks",
            "hint: kvtool profile --metrics 'answer_loss(heads=true)' -p h2o, "
            "or --allocator optimal",
        ],
    )
    done = kvtool("plan-budget", "-m", "model", "-q", "--context", "512", *BY_HEAD)
    assert "kvtool profile --metrics 'answer_loss(heads=true)' | kvtool plan-bud" in done.err


def test_heads_that_the_lists_of_a_profile_do_not_have_alike_are_refused():
    with pytest.raises(ValueError, match="has 1 entries, but there are 2 KV heads"):
        lossy(heads=of_heads(READER, [*READER[:3], [[0.02, 0.01]]]))
    with pytest.raises(ValueError, match="has 3 entries, but there are 2 samples"):
        lossy(heads=of_heads(READER, READER, READER))


def of_samples(*samples):
    """A profile with losses of these samples."""
    used = lossy()
    losses = used.metrics.answer_loss.model_copy(update={"by_sample": list(samples)})
    metrics = used.metrics.model_copy(update={"answer_loss": losses})
    return used.model_copy(update={"metrics": metrics}).to_yaml()


def test_budgets_stay_equal_within_the_noise_and_that_is_said(kvtool):
    one = [[0.0, 0.0], [0.0, 0.0], [4.0, 2.0], [0.0, 0.0]]  # would gain 0.58
    other = [[1.0, 0.1], [1.0, 0.1], [0.0, 0.0], [1.0, 0.1]]  # would lose 0.26
    Path("noisy.yaml").write_text(of_samples(one, other))
    done = kvtool("plan-budget", "noisy.yaml", "-b", "200", "-p", "h2o", "--allocator", "optimal")
    assert yaml.safe_load(done.out)["layers"]["tokens"] == [200] * 4
    assert "with equal budgets: no other split gains beyond noise" in done.err


def test_losses_of_one_sample_are_refused(kvtool):
    Path("one.yaml").write_text(of_samples([[1.0, 0.1]] * 4))
    done = kvtool("plan-budget", "one.yaml", "-b", "200", "--allocator", "optimal")
    assert done.code == 2
    assert "is of 1 sample, and how sure it is takes 2 or more" in done.err


def test_losses_of_another_policy_are_refused(kvtool):
    Path("lossy.yaml").write_text(lossy().to_yaml())
    asked = ("plan-budget", "lossy.yaml", "-b", "200", "-p", "tova", "--allocator")
    done = kvtool(*asked, "optimal")
    assert done.code == 2
    assert "is of policy `h2o`, and the plan for `tova`" in done.err
    assert "kvtool profile --metrics answer_loss -p tova" in done.err
    assert "predicted_loss" not in kvtool(*asked, "d2o").out


def test_bytes_for_several_rows(kvtool):
    size = 4 * 4 * 257 * (256 + 2 * 4)  # rows, layers, slots, a token and its positions
    plan = planned(
        kvtool, "profile.yaml", "--bytes", f"{size}B", "--batch", "4", "--allocator", "uniform"
    )
    assert plan["totals"]["storage"]["bytes"] == size
    assert plan["layers"]["tokens"] == [256] * 4
    wider = str(4 * 257 * (512 + 2 * 4))
    halves = ("--bytes", wider, "--dtype", "float32", "--allocator", "uniform")
    assert planned(kvtool, "profile.yaml", *halves)["layers"]["tokens"] == [256] * 4


def test_new_tokens_are_part_of_the_context(kvtool):
    plan = planned(kvtool, "-m", "model", "-b", "512", "--context", "32K", "-n", "128")
    assert plan["rocketkv"]["prompt_tokens"] == 3063
    assert plan["totals"]["share_of_full"] == 512 / (32768 - 128)


def test_the_policy_sets_the_least_of_a_layer(kvtool):
    given = ("both.yaml", "-b", "64", "--allocator", "d2o(norm=raw)")
    assert min(planned(kvtool, *given)["layers"]["tokens"]) == 8
    plan = planned(kvtool, *given, "-p", "SnapKV(window=16)+caote")
    assert plan["policy"] == "snapkv(window=16)+caote"
    assert min(plan["layers"]["tokens"]) == plan["layers"]["min_tokens"] == 17


def test_a_dry_run_prints_the_request(kvtool):
    done = kvtool("plan-budget", "profile.yaml", "--ratio", "20%", "-p", "h2o", "--dry-run", "-q")
    assert yaml.safe_load(done.out) == {
        "model": "toy",
        "revision": None,
        "dtype": "bfloat16",
        "profile": "profile.yaml",
        "target": {"ratio": 0.2, "context": 1000, "max_new_tokens": 0, "batch": 1},
        "allocator": "d2o",
        "policy": "h2o",
        "min_tokens": None,
    }


def test_text_and_pictures(kvtool):
    pytest.importorskip("matplotlib")
    done = kvtool("plan-budget", "profile.yaml", "--ratio", "20%", "-f", "text", "--plot", "a.svg")
    assert "d2o: 20% for prompts of 1,000 tokens" in done.out
    assert "█" in done.out
    assert "<svg" in Path("a.svg").read_text()
    kvtool("plan-budget", "profile.yaml", "--ratio", "20%", "-o", "plan.txt")
    assert Path("plan.txt").read_text() == done.out


def test_a_piped_profile_needs_no_torch():
    command = ("plan-budget", "-", "--ratio", "20%", "-q", "-o", "plan.yaml")
    assert ended(command, input=PROFILE) == [[0, ["pydantic"], []]]
    assert Path("plan.yaml").is_file()


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3"])
def test_models_of_all_shapes(kvtool, family):
    from transformers import AutoConfig

    kind, changes = FAMILIES[family]
    config = AutoConfig.for_model(kind, **({"num_hidden_layers": 4, "hidden_size": 64} | changes))
    config.save_pretrained("odd")
    plan = planned(kvtool, "-q", "-m", "odd", "-b", "100", "--context", "1000")
    expected = {
        "gemma3": [23, 100, 23, 100],
        "deepseek_v3": [100] * 4,
    }[family]
    assert plan["layers"]["tokens"] == expected
    assert ("rocketkv" in plan) == (family != "deepseek_v3")
    assert plan["totals"]["bytes"] == sum(expected) * plan["model"]["kv_bytes_per_token"] // 4


REFUSED = {  # arguments, what the error says, what the hint says
    "no target": ([], "no target", "-b 512, --ratio 20% or --bytes 64MiB"),
    "two targets": (["-b", "9", "--ratio", "20%"], "--budget and --ratio exclude each", None),
    "no share": (["--ratio", "512"], "--ratio must be a share of the prompt, got `512`", "20%"),
    "no bytes": (["--bytes", "20%"], "--bytes must be a number of bytes, got `20%`", "64MiB"),
    "no prompt": (["-b", "9", "-n", "1K"], "1024 leaves no prompt in a context of 1000", None),
    "unknown allocator": (["-b", "9", "--allocator", "d20"], "no allocator named `d20`", "`d2o`"),
    "no measurement": (
        ["-b", "9", "--allocator", "optimal"],
        "`optimal` needs a profile with `answer_loss`, and this one lacks it",
        "kvtool profile --metrics answer_loss",
    ),
    "nothing to plan": (
        ["-b", "9", "-p", "full"],
        "policy `full` keeps everything",
        "leave it out",
    ),
    "no picture": (["-b", "9", "--plot", "a.gif"], "--plot must end in .png, .svg, .pdf", None),
    "another model": (["-b", "9", "-m", "model"], "the profile is of model `toy`, whose", "-m mod"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(kvtool, name):
    arguments, message, hint = REFUSED[name]
    before = set(os.listdir())
    done = kvtool("plan-budget", "profile.yaml", "-q", *arguments)
    lines = done.err.splitlines()
    assert (done.code, done.out) == (2, "")
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert not lines[0].endswith(".")
    assert len(lines) == (1 if hint is None else 2), lines
    if hint is not None:
        assert hint in lines[1]
    assert set(os.listdir()) == before


def test_heads_that_4_bits_cannot_share_scales_in_are_refused(kvtool):
    config = Path("model/config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"head_dim": 48}))
    asked = ("-m", "model", "-b", "9", "--context", "90", "-q")
    done = kvtool("plan-budget", *asked, "-p", "h2o+int4")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines() == [
        "error: 4 bits share scales among 32 channels, and a head of this model has 48",
        "hint: take int8 or fp8, which take any head size",
    ]
    assert kvtool("plan-budget", *asked, "-p", "h2o+int8").code == 0


def test_a_codec_plans_more_tokens(kvtool):
    """A slot of h2o takes 2 heads x (2 vectors, a position and a number), a slot more a layer.

    A head has 3 bytes for each channel of its keys beside them.
    """
    size = 4 * 2 * ((2 * 34 + 8) * 501 + 3 * 32)
    asked = ("-m", "model", "--context", "4K", "--dtype", "bfloat16", "--bytes", f"{size}B")
    coded = planned(kvtool, *asked, "-p", "h2o+int8")
    assert coded["layers"]["tokens"] == [500] * 4
    assert (coded["policy"], coded["totals"]["bytes"]) == ("h2o+int8", size)
    assert coded["totals"]["share_of_full"] == size / (4 * 4096 * 256)
    plain = planned(kvtool, *asked, "-p", "h2o")
    assert sum(plain["layers"]["tokens"]) + 4 == size // (2 * (2 * 64 + 8))
    assert coded["model"] == plain["model"]


def test_a_model_beside_its_own_profile_is_accepted(kvtool):
    own = planned(kvtool, "-q", "-m", "model", "-b", "9")["model"]["config_hash"]
    Path("own.yaml").write_text(PROFILE.replace("config_hash: '0'", f"config_hash: {own}"))
    plan = planned(kvtool, "own.yaml", "-m", "model", "-b", "9", "--dtype", "float16")
    assert (plan["model"]["id"], plan["model"]["dtype"]) == ("model", "float16")
