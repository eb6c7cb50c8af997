"""PyramidKV: SnapKV's choice in every layer, on budgets along a line."""

import pytest
import torch

import kvtool
from kvtool.errors import UsageError
from kvtool.generation import prefill
from kvtool.policies.grammar import parse_policy
from tests.models_for_tests import peaky_model, random_ids

LAYERS = 4


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama", num_hidden_layers=LAYERS))


def filled(model, policy, budget, ids, prefill_mode="full"):
    cache = kvtool.build_cache(model, policy, budget, prefill=prefill_mode)
    prefill(model, cache, ids)
    return cache


def test_the_worked_example(model):
    cache = filled(model, "pyramidkv", 128, random_ids(1000))
    assert cache.report().kept_per_layer == [234 + 8, 158 + 8, 82 + 8, 6 + 8]


@pytest.mark.parametrize(
    ("n", "kept"),
    [
        (240, [232 + 8, 157 + 8, 83 + 8, 8 + 8]),  # the first layer has no more than the prompt
        (239, [128] * 4),
        (129, [128] * 4),  # between the budget and twice its past: the same for all
        (128, [128] * 4),
        (100, [100] * 4),
    ],
)
def test_short_prompts(model, n, kept):
    cache = filled(model, "pyramidkv", 128, random_ids(n))
    assert cache.report().kept_per_layer == kept
    assert sum(kept) == min(n, 128) * LAYERS


def test_each_layer_chooses_as_snapkv_does(model):
    ids = random_ids(300)
    cache = filled(model, "pyramidkv(kernel=5,pool=avg)", 40, ids)
    for layer, kept in enumerate(cache.report().kept_per_layer):
        alone = filled(model, "snapkv(window=8,kernel=5,pool=avg)", kept, ids)
        assert torch.equal(cache.kept_positions(layer), alone.kept_positions(layer))


def test_it_is_snapkv_with_the_pyramid_and_another_allocator_replaces_it(model):
    ids = random_ids(300)
    same = filled(model, "snapkv(window=8)+pyramid(beta=10)", 40, ids).report()
    assert filled(model, "pyramidkv(beta=10)", 40, ids).report() == same
    flat = filled(model, "pyramidkv+uniform", 40, ids).report()
    assert flat.kept_per_layer == [40] * LAYERS


def test_blocks_cut_to_the_same_budgets(model):
    whole = filled(model, "pyramidkv", 40, random_ids(300)).report()
    blocks = filled(model, "pyramidkv", 40, random_ids(300), "block:64").report()
    assert blocks.kept_per_layer == whole.kept_per_layer
    assert blocks.peak_bytes < whole.peak_bytes


def test_its_spelling_and_what_is_refused():
    assert str(parse_policy("PyramidKV(beta=20, window=8)")) == "pyramidkv"
    assert str(parse_policy("pyramidkv(beta=5)+caote")) == "pyramidkv(beta=5.0)+caote"
    for text, told in [
        ("pyramidkv(beta=0.5)", "beta must be 1 or more"),
        ("pyramidkv(window=0)", "pyramidkv: window must be"),
        ("pyramidkv(kernel=4)", "pyramidkv: kernel must be odd"),
    ]:
        with pytest.raises(UsageError, match=told):
            parse_policy(text)
