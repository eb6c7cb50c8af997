"""The bytes that a dry run promises, against those of real caches."""

import pytest
import torch

from kvtool.cache.entry.build import build_cache
from kvtool.cache.hooks.attach import attach
from kvtool.errors import UsageError
from kvtool.generation import compress
from kvtool.planning.estimate import bytes_held, check_bytes
from tests.evaluation.variants import make_variants
from tests.models_for_tests import family_model

PROMPT = 61  # tokens; the sliding windows of the tiny models are 24
BUDGETS = ["13", "45%", "100", "17KiB"]


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma2", "gemma3n", "llama4", "qwen3_next"])
def test_bytes_are_those_of_the_cache_that_has_read_the_prompt(name):
    model = family_model(name)
    attach(model)
    ids = torch.randint(3, 96, (1, PROMPT), generator=torch.Generator().manual_seed(5))
    for arm in make_variants(["streaming", "snapkv(window=4)"], BUDGETS):
        cache = build_cache(model, arm.policy, arm.budget)
        compress(model, cache, ids)
        held = cache.report().kv_bytes
        assert bytes_held(model.config, "float32", arm, PROMPT) == held, arm.name


@pytest.mark.parametrize("policy", ["quest", "rocketkv(window=8)", "adakv"])
def test_a_budget_of_what_is_read_is_not_what_is_stored(policy):
    model = attach(family_model("llama"))
    prompt = 400
    ids = torch.randint(3, 96, (1, prompt), generator=torch.Generator().manual_seed(5))
    for arm in make_variants([policy], ["64", "500", "20%"], baseline=False):
        cache = build_cache(model, arm.policy, arm.budget)
        compress(model, cache, ids)
        held = cache.report().kv_bytes
        assert bytes_held(model.config, "float32", arm, prompt) == held, arm.name


def test_half_as_wide_numbers_take_half_the_bytes():
    config = family_model("gemma2").config
    (arm,) = make_variants(["streaming"], ["13"], baseline=False)
    wide = bytes_held(config, "float32", arm, PROMPT)
    assert 2 * bytes_held(config, "bfloat16", arm, PROMPT) == wide


def test_bytes_that_hold_no_token_or_protected_ones_only_are_refused():
    config = family_model("llama").config
    token = 4 * 2 * (2 * 16 * 4 + 4)  # layers, heads, K and V of float32, a position
    (arm,) = make_variants(["streaming"], [f"{2 * token - 1}B"], baseline=False)
    with pytest.raises(UsageError, match=f"one token in every layer takes {2 * token} bytes"):
        check_bytes(config, "float32", [arm])
    (arm,) = make_variants(["streaming(sinks=4)"], [f"{5 * token}B"], baseline=False)
    with pytest.raises(UsageError, match="is 4 tokens: budget 4 is not above sinks 4"):
        check_bytes(config, "float32", [arm])
    (arm,) = make_variants(["streaming(sinks=4)"], [f"{6 * token}B"], baseline=False)
    check_bytes(config, "float32", [arm])


def test_a_share_that_protected_tokens_fill_is_refused():
    config = family_model("llama").config
    (arm,) = make_variants(["streaming(sinks=4)"], ["5%"], baseline=False)
    with pytest.raises(UsageError, match="streaming@5%: 5% of 61 tokens: budget 3 is not above"):
        bytes_held(config, "float32", arm, PROMPT)
