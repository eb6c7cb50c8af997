"""A plan from Python in one call: from a profile, a configuration, a model or its name."""

from pathlib import Path

import pytest
from transformers import AutoConfig

import kvtool

PROFILE = {"samples": 1, "tokens": 96, "metrics": "f_variance"}
LLAMA = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"tokens": 64, "context": "1K"}, ["-b", "64", "--context", "1K"]),
        (
            {"ratio": 0.2, "policy": "h2o+caote", "max_new_tokens": 32, "context": 512},
            ["--ratio", "20%", "-p", "h2o+caote", "-n", "32", "--context", "512"],
        ),
        (
            {"bytes": 2**20, "allocator": "pyramid", "batch": 2, "min_tokens": 4},
            ["--bytes", "1MiB", "--allocator", "pyramid", "--batch", "2", "--min-tokens", "4"],
        ),
    ],
    ids=["tokens", "ratio", "bytes"],
)
def test_a_call_is_the_command_with_the_same_settings(command, settings, flags):
    assert kvtool.plan(**settings).to_data() == command("plan-budget", *flags)


def test_a_profile_is_a_document_its_data_or_its_file(command):
    profile = kvtool.profile(**PROFILE)
    Path("profile.json").write_text(profile.to_json())
    expected = command("plan-budget", "profile.json", "--ratio", "20%")
    for source in (profile, profile.to_data(), "profile.json", Path("profile.json")):
        assert kvtool.plan(source, ratio=0.2).to_data() == expected
    assert expected["layers"]["allocator"] == "d2o"
    assert kvtool.plan(profile, model="reference", ratio=0.2).layers.tokens == (
        kvtool.plan(profile, ratio=0.2).layers.tokens
    )


def test_a_configuration_is_planned_for_without_weights(command):
    config = AutoConfig.for_model("llama", **LLAMA)
    config.save_pretrained("llama")
    planned = kvtool.plan(config, tokens=64, context=512)
    by_folder = kvtool.plan("llama", tokens=64, context=512)
    assert by_folder.to_data() == command("plan-budget", "-m", "llama", "-b", "64", "--context=512")
    assert planned.layers == by_folder.layers
    assert planned.totals == by_folder.totals
    assert planned.model.config_hash == by_folder.model.config_hash


def test_a_loaded_model_is_planned_for_in_its_own_dtype(loaded):
    named = kvtool.plan(None, tokens=64)
    assert kvtool.plan(loaded, tokens=64).to_data() == named.to_data()
    half = kvtool.plan(loaded.model.bfloat16(), tokens=64)
    assert half.model.dtype == "bfloat16"
    assert half.totals.bytes * 2 == named.totals.bytes
    assert kvtool.plan(loaded.model, tokens=64, dtype="float32").totals == named.totals


def test_a_plan_from_a_call_is_obeyed():
    plan = kvtool.plan(None, tokens=40, context=256, allocator="pyramid", policy="h2o")
    document = kvtool.generate(None, "The old lamp was near. " * 20, plan=plan, max_new_tokens=4)
    assert document.cache.kept_per_layer == plan.layers.tokens
    assert len(set(plan.layers.tokens)) > 1


def test_mistakes_are_told_in_one_line():
    for settings, message in [
        ({}, "no target; "),
        ({"tokens": 64, "ratio": 0.2}, "exclude each other"),
        ({"tokens": 512.0}, "tokens must be a whole number, got 512.0; ratio takes a share"),
        ({"tokens": "20%"}, "`20%` is not a number of tokens"),
        ({"ratio": 3.0}, "budget ratio 3 is above 1"),
        ({"tokens": 64, "policy": 5}, "a policy is a string or a kvtool policy, got `5`"),
        ({"tokens": 64, "policy": "full"}, "keeps everything"),
        ({"tokens": 64, "allocator": 5}, "allocator must be text, got `5`"),
        ({"tokens": 64, "dtype": "float9"}, "dtype must be `auto`, `float32`, `bfloat16`"),
        ({"tokens": 64, "batch": 0}, "batch must be at least 1, got `0`"),
        ({"tokens": 64, "source": 5}, "a plan is made from a profile, a configuration, .* got int"),
        ({"tokens": 64, "source": "none.yaml"}, "cannot read profile `none.yaml`: No such file"),
        (
            {"tokens": 64, "source": {"kind": "plan"}},
            "takes kind `profile`, got `plan`",
        ),
    ]:
        with pytest.raises(kvtool.UsageError, match=message) as error:
            kvtool.plan(**settings)
        assert "\n" not in str(error.value)
