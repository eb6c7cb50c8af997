"""A model whose layers are on several devices: each layer's slots live where the layer runs.

There is one device here. Layers whose weights rest on the disk stand for offloading, and the device
`meta`, where nothing can be mixed with tensors of another device, for a second GPU.
"""

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import AutoModelForCausalLM

import kvtool
from kvtool.cache.files.load import load_cache
from kvtool.cache.files.save import save_cache
from kvtool.generation.feeding import decode_step, prefill
from tests.cache.split_model import BUDGET, one
from tests.models_for_tests import any_cache, peaky_model, random_ids
from tests.tiers import first, first_rows

PLACES = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "lm_head": "disk",
}


@pytest.fixture(scope="module")
def whole():
    return kvtool.attach(peaky_model("llama"))


@pytest.fixture(scope="module")
def offloaded(whole, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    peaky_model("llama").save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, device_map=PLACES, offload_folder=folder / "weights"
    )
    assert next(model.model.layers[1].parameters()).is_meta
    return kvtool.attach(model)


@pytest.mark.parametrize(
    "policy", first(1, ["tova+d2o-alloc", "kvzip", "rocketkv", "adakv(window=4)", "sirllm"])
)
def test_an_offloaded_model_keeps_and_says_the_same(whole, offloaded, policy):
    expected, found = (one(model, any_cache(model, policy, BUDGET)) for model in (whole, offloaded))
    logits = (torch.tensor(result.pop("logits")) for result in (found, expected))
    torch.testing.assert_close(*logits)
    assert found == expected


def test_an_offloaded_model_goes_on_from_a_saved_cache(offloaded, tmp_path):
    cache = kvtool.build_cache(offloaded, "h2o", BUDGET)
    logits = prefill(offloaded, cache, random_ids(61))
    save_cache(cache, tmp_path / "cache.safetensors", model_name="small")
    loaded = load_cache(tmp_path / "cache.safetensors", offloaded)
    for _ in range(8):
        token = logits.argmax(-1)
        logits = decode_step(offloaded, cache, token)
        torch.testing.assert_close(decode_step(offloaded, loaded, token), logits)


def on_two_devices():
    """Four layers, the last two and what follows on the device `meta`."""
    model = peaky_model("llama", num_hidden_layers=4)
    for module in (*model.model.layers[2:], model.model.norm, model.lm_head):
        module.to("meta")
        add_hook_to_module(module, AlignDevicesHook(execution_device=torch.device("meta")))
    return kvtool.attach(model)


@pytest.mark.parametrize(
    ("policy", "mode"),
    first_rows(1, [("h2o+caote", "block:16"), ("random", "full")]),
)
def test_slots_live_beside_their_layer(policy, mode):
    model = on_two_devices()
    cache = any_cache(model, policy, BUDGET, prefill=mode)
    with torch.no_grad():
        prefill(model, cache, random_ids(61))
        for token in range(5):
            decode_step(model, cache, torch.tensor([token]))
        prefill(model, cache, random_ids(20))
        for token in range(5):
            decode_step(model, cache, torch.tensor([token]))
    for layer, place in zip(cache.layers, ("cpu", "cpu", "meta", "meta"), strict=True):
        tensors = layer.slots.tensors()
        assert {tensor.device.type for tensor in tensors} == {place}
        assert layer.slots.used == BUDGET + 1
    groups = [cache.groups.by_layer.get(i) for i in range(4)]
    assert groups[0] is groups[1] is not None
    assert groups[2] is groups[3] is not None
    assert groups[0] is not groups[2]
