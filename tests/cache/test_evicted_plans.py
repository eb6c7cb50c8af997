"""CAOTE under a D2O plan, merged or set aside: padded, saved, reloaded, it goes on unbroken."""

import json

import pytest
import torch

import kvtool
from kvtool.cli.main import main
from kvtool.generation import decode_step, prefill
from kvtool.models.load import load

pytestmark = pytest.mark.few(2)  # every policy goes through tests/contract


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(load().model)


@pytest.fixture
def plan(tmp_path, capsys):
    """Budgets of the layers by the profile of a short text."""
    profile = str(tmp_path / "profile.yaml")
    short = ("--samples", "1", "--tokens", "256", "--decode", "4", "--metrics", "f_variance")
    assert main(["profile", *short, "-o", profile, "-q"]) == 0
    made = ("-b", "40", "--context", "200", "--allocator", "d2o(norm=minmax)")
    capsys.readouterr()
    assert main(["plan-budget", profile, *made, "-f", "json", "-q"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.few(1)
@pytest.mark.each_once
@pytest.mark.parametrize("policy", ["d2o+caote", "h2o+caote+calidrop", "snapkv(window=4)+calidrop"])
@pytest.mark.parametrize("mode", ["full", "block:32"])
def test_padded_rows_are_saved_and_go_on_unbroken(model, plan, policy, mode, tmp_path):
    assert len(set(plan["layers"]["tokens"])) > 1
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 400, (2, 200), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :77] = 0
    cache = kvtool.build_cache(model, policy, plan=plan, prefill=mode)
    prefill(model, cache, ids, mask)
    assert sum(cache.report().kept_per_layer) == sum(plan["layers"]["tokens"])
    tokens = torch.randint(5, 400, (80, 2), generator=generator)
    for token in tokens[:70]:
        decode_step(model, cache, token)
    kvtool.save_cache(cache, tmp_path / "a.safetensors", model=model)
    loaded = kvtool.load_cache(tmp_path / "a.safetensors", model)
    assert loaded.report().host_bytes == cache.report().host_bytes
    assert loaded.report().recompute_frequency == cache.report().recompute_frequency
    for token in tokens[70:]:
        ours, unbroken = decode_step(model, loaded, token), decode_step(model, cache, token)
        torch.testing.assert_close(ours, unbroken, atol=5e-4, rtol=5e-4)
    for layer in range(4):
        assert torch.equal(loaded.kept_positions(layer), cache.kept_positions(layer))
    turn = torch.randint(5, 400, (2, 20), generator=generator)
    ours, unbroken = prefill(model, loaded, turn), prefill(model, cache, turn)
    torch.testing.assert_close(ours, unbroken, atol=5e-4, rtol=5e-4)
