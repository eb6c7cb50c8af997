"""What older releases of transformers say about layers is told as the pinned one tells it."""

import pytest
from transformers import AutoConfig, cache_utils

from kvtool.transformers_versions import layer_types, shares_caches
from tests.models_for_tests import BASE, HYBRID

MIXED = {**BASE, "head_dim": 16, "sliding_window": 24, "layer_types": HYBRID}


@pytest.mark.parametrize("shared", [0, 1])
def test_arguments_given_once_for_all_layers_go_to_the_layers_they_are_for(monkeypatch, shared):
    """As before 5.19: one dict, and no layer that uses the cache of another."""
    config = AutoConfig.for_model("gemma3_text", **MIXED)
    expected = [("sliding_attention", {"sliding_window": 24}), ("full_attention", {})] * 2
    assert layer_types(config) == expected
    kinds = HYBRID[: 4 - shared]
    monkeypatch.setattr(
        cache_utils,
        "get_layer_types_and_kwargs",
        lambda config: (kinds, {"sliding_window": 24, "number_of_states": 1}),
    )
    assert layer_types(config) == expected[: 4 - shared] + [("dummy", {})] * shared


def test_layers_that_share_a_cache_are_known_by_either_name():
    config = AutoConfig.for_model("llama", **BASE)
    assert not shares_caches(config)
    config.num_kv_shared_layers = 2
    assert shares_caches(config)
    config.num_kv_shared_layers = 0
    config.kv_sharing_modes = ["store", "reuse"]
    assert shares_caches(config)
