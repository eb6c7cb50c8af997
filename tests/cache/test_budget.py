"""What fits is untouched, what does not is freed: bytes counted from the tensors, every step."""

from __future__ import annotations

import pytest
import torch

import kvtool
from kvtool.cache.slots.layer import SlotLayer
from kvtool.generation import decode_step, prefill
from tests.models_for_tests import peaky_model, random_ids
from tests.tiers import first

STEADY = ["random", "streaming", "scissorhands", "tova+fastcaote", "roco"]
PACED = ["roco+caote+every(steps=7)", "rkv(window=4,buffer=5)"]
PACED += ["h2o(positions=cache)+every(steps=7)", "snapkv(window=4)+caote+every(steps=7)"]
PACED += ["h2o+d2o-merge+every(steps=7)", "streaming+calidrop+every(steps=7)"]
SLOT = 2 * 2 * 16 * 4  # bytes of one slot of a layer: 2 KV heads, key and value of 16 floats


@pytest.mark.parametrize(
    ("policy", "length"), [("h2o+caote", 60), ("roco", 21), ("snapkv(window=5)", 60)]
)
def test_no_step_holds_more_than_the_budget_and_one(policy, length):
    """After every block or token, from the storage that the layer's tensors keep alive."""
    model = kvtool.attach(peaky_model("llama"))
    budget, generated, appends = 20, 0, policy.startswith("snapkv")
    cache = kvtool.build_cache(model, policy, budget, prefill="block:16")
    seen = []

    def look(module, args, output):
        for layer in cache.layers:
            stored = sum(
                t.untyped_storage().nbytes() for t in (layer.keys, layer.values) if t is not None
            )
            seen.append(stored)
            held = budget + (generated if appends else 0)
            roomy = held * 1.25 + 17 if generated and appends else held + 1
            assert stored <= roomy * SLOT

    for layer in model.model.layers:
        layer.register_forward_hook(look)
    prefill(model, cache, random_ids(length))
    assert cache.report().kept_per_layer == [20, 20]
    for token in random_ids(25, seed=1)[0]:
        generated += 1
        decode_step(model, cache, token[None])
    kept = 20 + (25 if appends else 0)
    report = cache.report()
    assert report.kept_per_layer == [kept, kept]
    assert report.kv_bytes == 2 * kept * SLOT
    assert report.full_bytes == 2 * (length + 25) * SLOT
    assert report.tokens_seen == length + 25
    assert max(seen) <= report.peak_bytes
    if length == 60:
        # two layers of budget and one, and in one of them the kept slots and a block once more
        assert report.peak_bytes <= (2 * (kept * 1.25 + 17) + budget + 16) * SLOT
    positions = cache.kept_positions(0)
    assert positions.dtype == torch.int64
    assert (positions.diff(dim=-1) > 0).all()
    assert (positions[..., -1] == length + 24).all()


def test_a_prompt_read_at_once_leaves_nothing_of_it_alive():
    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, "h2o", 20)
    prefill(model, cache, random_ids(500))
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            assert tensor.untyped_storage().nbytes() == 21 * SLOT / 2


def test_a_budget_in_bytes_is_that_of_the_whole_cache():
    model = kvtool.attach(peaky_model("llama"))
    slot = SLOT + 2 * (4 + 4)  # with positions and H2O's number; one slot takes the new token
    cache = kvtool.build_cache(model, "h2o", f"{2 * 2 * 25 * slot}B")
    prefill(model, cache, random_ids(60, batch=2))
    report = cache.report()
    assert report.kept_per_layer == [24, 24]
    assert report.kv_bytes == 2 * 2 * 24 * SLOT
    assert report.allocated_bytes + report.state_bytes == 2 * 2 * 25 * slot
    with pytest.raises(kvtool.UsageError, match=f"one token in every layer takes {4 * slot} by"):
        prefill(model, kvtool.build_cache(model, "h2o", "500B"), random_ids(60))


def test_a_ratio_is_of_the_prompt_even_when_it_comes_in_blocks():
    model = kvtool.attach(peaky_model("llama"))
    for mode in ("full", "block:16"):
        cache = kvtool.build_cache(model, "h2o", "30%", prefill=mode)
        prefill(model, cache, random_ids(61))
        assert cache.report().kept_per_layer == [18, 18]
        prefill(model, cache, random_ids(39))
        assert cache.report().kept_per_layer == [30, 30]


def test_budgets_that_make_no_sense_are_refused():
    model = peaky_model("llama")
    for policy, budget, message in (
        ("h2o", None, "needs a budget"),
        ("streaming", 4, "budget 4 is not above sinks 4"),
        ("roco", 5, "budget 5 is not above sinks 4 \\+ protect_recent 1 = 5"),
        ("h2o", 0, "budget 0 is not above 0"),
    ):
        with pytest.raises(kvtool.UsageError, match=message):
            kvtool.build_cache(model, policy, budget)


@pytest.mark.parametrize("policy", first(2, ["h2o+caote", PACED[0], *STEADY, *PACED[1:]]))
def test_layers_decide_together_what_they_decide_alone(policy, monkeypatch):
    """In steady state one set of operations chooses for all layers, with equal bits."""
    model = kvtool.attach(peaky_model("llama", num_hidden_layers=3))
    found = []
    for together in (True, False):
        if not together:
            monkeypatch.setattr(
                "kvtool.cache.steps.grouped.LayerGroups.form", lambda *_, **__: None
            )
        cache = kvtool.build_cache(model, policy, 20)
        steps = [prefill(model, cache, random_ids(40, batch=2))]
        for i, tokens in enumerate(random_ids(19, seed=1, batch=2).T):
            if i == 8:
                steps.append(prefill(model, cache, random_ids(5, seed=2, batch=2)))
            if i == 11:
                cache.reorder_cache(torch.tensor([1, 0]))
            steps.append(decode_step(model, cache, tokens))
            grouped = len(cache.groups.by_layer) == 3
            assert grouped == (together and (policy in PACED or i not in (0, 8)))
        kept = [cache.kept_positions(layer).tolist() for layer in range(3)]
        found.append((torch.stack(steps), kept, cache.report()))
    # alone a paced layer asks for weights it may not need, which another kernel computes
    close = {"atol": 1e-4 if policy in PACED else 0, "rtol": 0}
    torch.testing.assert_close(found[0][0], found[1][0], **close)
    assert found[0][1:] == found[1][1:]


def test_every_layer_of_a_model_has_its_own_slots():
    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, "tova", 20)
    assert all(isinstance(layer, SlotLayer) for layer in cache.layers)
    with pytest.raises(kvtool.KvtoolError, match="the cache is empty"):
        cache.kept_positions(0)
