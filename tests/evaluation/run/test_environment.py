"""What results say of the model, against the tensors that its cache holds."""

import pytest

import kvtool
from kvtool.evaluation.run.environment import model_used
from kvtool.generation import prefill
from kvtool.models.load import Loaded
from tests.models_for_tests import family_model, random_ids


@pytest.mark.parametrize(
    "family", ["llama", "gpt_neox", "falcon", "deepseek_v3", "falcon_h1", "gemma4"]
)
def test_heads_are_those_that_the_cache_stores(family):
    model = kvtool.attach(family_model(family))
    if family == "gpt_neox":  # which knows no such setting, and ignores ours
        del model.config.num_key_value_heads
    used = model_used(Loaded(model, None, family, None, "hash"))
    cache = kvtool.build_cache(model, "full")
    prefill(model, cache, random_ids(9))
    keys = {layer.keys.shape[1::2] for layer in cache.slot_layers}
    latent = 8 if family == "deepseek_v3" else 0  # the rotated key lies beside the latent vector
    assert (used.kv_heads, used.head_dim - latent) in keys  # of two sizes, that of the first layer
    assert len(keys) == (2 if family == "gemma4" else 1)
    assert used.layers == len(cache.layers)
