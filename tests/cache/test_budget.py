"""What fits is untouched, what does not is freed: bytes counted from the tensors, every step."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import kvtool
from kvtool.cache.slots.layer import SlotLayer
from kvtool.generation import decode_step, prefill
from tests.models_for_tests import peaky_model, random_ids

pytestmark = pytest.mark.few(2)  # every policy goes through tests/contract

STEADY = [
    "random",
    "recency",
    "streaming",
    "scissorhands",
    "h2o",
    "h2o+caote",
    "tova",
    "tova+fastcaote",
    "roco",
    "roco+caote",
]
PROMPT = ["snapkv(window=5)", "snapkv(window=5)+caote"]
SLOT = 2 * 2 * 16 * 4  # bytes of one slot of a layer: 2 KV heads, key and value of 16 floats


@pytest.mark.parametrize("policy", ["full", *STEADY, *PROMPT])
@pytest.mark.parametrize("mode", ["full", "block:16"])
def test_a_budget_that_fits_gives_the_full_caches_logits(policy, mode):
    plain, ours = peaky_model("llama"), kvtool.attach(peaky_model("llama"))
    ids, new = random_ids(60), random_ids(12, seed=1)[0]
    cache = DynamicCache(config=plain.config)
    with torch.no_grad():
        expected = [plain(ids, past_key_values=cache).logits[:, -1]]
        for token in new:
            expected.append(plain(token.view(1, 1), past_key_values=cache).logits[:, -1])
    kept = kvtool.build_cache(ours, policy, None if policy == "full" else 72, prefill=mode)
    logits = [prefill(ours, kept, ids), *(decode_step(ours, kept, token[None]) for token in new)]
    torch.testing.assert_close(torch.cat(logits), torch.cat(expected), atol=1e-5, rtol=1e-5)
    assert kept.report().kept_per_layer == [72, 72]
    assert kept.report().kv_bytes == kept.report().full_bytes == 2 * 72 * SLOT


@pytest.mark.few(4)
@pytest.mark.parametrize("policy", STEADY + PROMPT)
@pytest.mark.parametrize("length", [20, 21, 60])
def test_no_step_holds_more_than_the_budget_and_one(policy, length):
    """After every block or token, from the storage that the layer's tensors keep alive."""
    model = kvtool.attach(peaky_model("llama"))
    budget, generated = 20, 0
    cache = kvtool.build_cache(model, policy, budget, prefill="block:16")
    seen = []

    def look(module, args, output):
        for layer in cache.layers:
            stored = sum(
                t.untyped_storage().nbytes() for t in (layer.keys, layer.values) if t is not None
            )
            seen.append(stored)
            held = budget + (generated if policy.startswith("snapkv") else 0)
            roomy = held + 1 if not generated or policy not in PROMPT else held * 1.25 + 17
            assert stored <= roomy * SLOT

    for layer in model.model.layers:
        layer.register_forward_hook(look)
    prefill(model, cache, random_ids(length))
    assert cache.report().kept_per_layer == [20, 20]
    for token in random_ids(25, seed=1)[0]:
        generated += 1
        decode_step(model, cache, token[None])
    kept = 20 + (25 if policy in PROMPT else 0)
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


@pytest.mark.parametrize(
    ("policy", "budget", "message"),
    [
        ("h2o", None, "needs a budget"),
        ("streaming", 4, "budget 4 is not above sinks 4"),
        ("snapkv", 32, "budget 32 is not above window 32"),
        ("roco", 5, "budget 5 is not above sinks 4 \\+ protect_recent 1 = 5"),
        ("h2o(recent=8)", 8, "budget 8 is not above recent 8"),
        ("h2o", 0, "budget 0 is not above 0"),
    ],
)
def test_budgets_that_make_no_sense_are_refused(policy, budget, message):
    with pytest.raises(kvtool.UsageError, match=message):
        kvtool.build_cache(peaky_model("llama"), policy, budget)


PACED = ["h2o+every(steps=7)", "roco+caote+every(steps=7)", "tova+every(steps=5)"]
PACED += ["keydiff+every(steps=7)", "rkv(window=4,buffer=5)", "h2o(positions=cache)+every(steps=7)"]
PACED += ["snapkv(window=4)+every(steps=7)", "snapkv(window=4)+caote+every(steps=7)"]
PACED += ["h2o+d2o-merge+every(steps=7)", "streaming+calidrop+every(steps=7)"]


@pytest.mark.exhaustive
def test_layers_decide_together_what_they_decide_alone(monkeypatch):
    """In steady state one set of operations chooses for all layers, with equal bits."""
    model = kvtool.attach(peaky_model("llama", num_hidden_layers=4))
    results = []
    for together in (True, False):
        if not together:
            monkeypatch.setattr("kvtool.cache.steps.groups.LayerGroups.form", lambda *_, **__: None)
        for policy in (*STEADY, *PACED):
            cache = kvtool.build_cache(model, policy, 20)
            steps = [prefill(model, cache, random_ids(50, batch=2))]
            for i, tokens in enumerate(random_ids(30, seed=1, batch=2).T):
                if i == 12:
                    steps.append(prefill(model, cache, random_ids(5, seed=2, batch=2)))
                if i == 20:
                    cache.reorder_cache(torch.tensor([1, 0]))
                steps.append(decode_step(model, cache, tokens))
                grouped = len(cache.groups.by_layer) == 4
                assert grouped == (together and (policy in PACED or i not in (0, 12)))
            kept = [cache.kept_positions(layer).tolist() for layer in range(4)]
            results.append((torch.stack(steps), kept, cache.report()))
    half = len(results) // 2
    for i, (ours, theirs) in enumerate(zip(results[:half], results[half:], strict=True)):
        # alone a paced layer asks for weights it may not need, which another kernel computes
        torch.testing.assert_close(ours[0], theirs[0], atol=0 if i < len(STEADY) else 1e-4, rtol=0)
        assert ours[1:] == theirs[1:]


def test_every_layer_of_a_model_has_its_own_slots():
    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, "tova", 20)
    assert all(isinstance(layer, SlotLayer) for layer in cache.layers)
    with pytest.raises(kvtool.KvtoolError, match="the cache is empty"):
        cache.kept_positions(0)
