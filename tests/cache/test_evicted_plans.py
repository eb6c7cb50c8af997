"""Evicted tokens, merged or set aside, under a plan of unequal layers: padded, saved, reloaded."""

import pytest
import torch

import kvtool
from kvtool.generation import decode_step, prefill
from tests.models_for_tests import peaky_model, random_ids
from tests.tiers import first_rows

TOKENS = [31, 12]


@pytest.mark.parametrize(
    ("policy", "mode"),
    first_rows(
        1,
        [
            ("h2o+caote+calidrop", "full"),
            ("d2o+caote", "block:32"),
            ("snapkv(window=4)+calidrop", "block:32"),
        ],
    ),
)
def test_padded_rows_are_saved_and_go_on_unbroken(policy, mode, tmp_path):
    model = kvtool.attach(peaky_model("llama"))
    plan = kvtool.plan(model.config, dtype="float32", tokens=20, context=90).to_data()
    plan["layers"] |= {"tokens": TOKENS, "fractions": None, "min_tokens": min(TOKENS)}
    del plan["totals"]
    ids = random_ids(90, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    cache = kvtool.build_cache(model, policy, plan=plan, prefill=mode)
    prefill(model, cache, ids, mask)
    assert cache.report().kept_per_layer == TOKENS
    tokens = random_ids(30, seed=1, batch=2).T
    for token in tokens[:22]:
        decode_step(model, cache, token)
    kvtool.save_cache(cache, tmp_path / "a.safetensors", model=model)
    loaded = kvtool.load_cache(tmp_path / "a.safetensors", model)
    assert loaded.report().host_bytes == cache.report().host_bytes
    assert loaded.report().recompute_frequency == cache.report().recompute_frequency
    for token in tokens[22:]:
        ours, unbroken = decode_step(model, loaded, token), decode_step(model, cache, token)
        torch.testing.assert_close(ours, unbroken, atol=5e-4, rtol=5e-4)
    for layer in range(2):
        assert torch.equal(loaded.kept_positions(layer), cache.kept_positions(layer))
    turn = random_ids(20, seed=2, batch=2)
    ours, unbroken = prefill(model, loaded, turn), prefill(model, cache, turn)
    torch.testing.assert_close(ours, unbroken, atol=5e-4, rtol=5e-4)
