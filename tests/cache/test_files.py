"""A saved cache goes on as if it had never been saved; what does not fit is refused."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kvtool
from kvtool.cache.tensor_files.tensor_file import digest_of
from kvtool.generation import decode_step, prefill
from tests.models_for_tests import peaky_model, random_ids


def feed(model, cache, tokens):
    return torch.stack([decode_step(model, cache, token) for token in tokens])


@pytest.mark.parametrize(  # every policy as it is goes through tests/contract
    "policy",
    [
        "full",
        "snapkv(window=4)+calidrop(store=int8)",
        "h2o(positions=cache)+caote+ada",
    ],
)
def test_a_loaded_cache_goes_on_like_the_unbroken_one(policy, tmp_path):
    model = kvtool.attach(peaky_model("llama"))
    ids, first, rest = random_ids(50), random_ids(9, seed=1)[0], random_ids(12, seed=2)[0]
    budget = None if policy == "full" else 20
    cache = kvtool.build_cache(model, policy, budget, prefill="block:16")
    prefill(model, cache, ids)
    feed(model, cache, first[:, None])
    text = torch.cat([ids, first[None]], 1)
    path = tmp_path / "a.safetensors"
    kvtool.save_cache(cache, path, model=model, input_ids=text)
    loaded = kvtool.load_cache(path, model)
    assert loaded.input_ids.tolist() == text.tolist()
    for layer in range(2):
        assert torch.equal(loaded.kept_positions(layer), cache.kept_positions(layer))
    unbroken, continued = feed(model, cache, rest[:, None]), feed(model, loaded, rest[:, None])
    torch.testing.assert_close(continued, unbroken, atol=1e-5, rtol=1e-5)
    assert continued.argmax(-1).tolist() == unbroken.argmax(-1).tolist()
    for layer in range(2):
        assert torch.equal(loaded.kept_positions(layer), cache.kept_positions(layer))


def test_a_padded_batch_of_ratio_budgets_survives(tmp_path):
    model = kvtool.attach(peaky_model("llama"))
    ids = random_ids(40, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :22] = 0
    cache = kvtool.build_cache(model, "h2o+caote", 0.5)
    prefill(model, cache, ids, mask)
    feed(model, cache, random_ids(3, seed=3, batch=2).T)
    kvtool.save_cache(cache, tmp_path / "a.safetensors", model=model, input_ids=ids)
    loaded = kvtool.load_cache(tmp_path / "a.safetensors", model)
    assert loaded.tokens_seen() == cache.tokens_seen() == [21, 43]
    more = random_ids(6, seed=4, batch=2).T
    torch.testing.assert_close(
        feed(model, loaded, more), feed(model, cache, more), atol=1e-5, rtol=1e-5
    )
    for layer in range(2):
        assert torch.equal(loaded.kept_positions(layer), cache.kept_positions(layer))


def test_recurrent_layers_are_saved_too(tmp_path):
    model = kvtool.attach(
        peaky_model("lfm2", layer_types=["conv", "full_attention"], num_attention_heads=4)
    )
    cache = kvtool.build_cache(model, "h2o", 12)
    prefill(model, cache, random_ids(30))
    kvtool.save_cache(cache, tmp_path / "a.safetensors", model=model, input_ids=random_ids(30))
    loaded = kvtool.load_cache(tmp_path / "a.safetensors", model)
    tokens = random_ids(5, seed=1)[0][:, None]
    torch.testing.assert_close(feed(model, loaded, tokens), feed(model, cache, tokens))


@pytest.fixture
def saved(tmp_path):
    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, "h2o", 20)
    logits = prefill(model, cache, random_ids(50))
    path = tmp_path / "a.safetensors"
    kvtool.save_cache(cache, path, model=model, input_ids=random_ids(50), next_logits=logits)
    return model, path


def test_the_file_holds_what_the_contract_names(saved):
    path = saved[1]
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["kind"] == "kvtool.cache"
    assert metadata["schema_version"] == "1"
    assert (metadata["policy"], metadata["budget"], metadata["tokens_seen"]) == ("h2o", "20", "50")
    tensors = load_file(path)
    assert tensors["layer.1.keys"].shape == tensors["layer.1.values"].shape == (1, 2, 20, 16)
    positions = tensors["layer.1.positions"]
    assert positions.dtype == torch.int64
    assert (positions.diff(dim=-1) > 0).all()
    assert tensors["layer.1.state.attention_sum"].shape == (1, 2, 20)
    assert tensors["input_ids"].shape == (1, 50)
    assert tensors["next_logits"].shape == (1, 96)


def test_a_changed_number_or_label_is_refused(saved):
    model, path = saved
    whole = path.read_bytes()
    path.write_bytes(whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:])
    with pytest.raises(kvtool.KvtoolError, match="checksum"):
        kvtool.load_cache(path, model)
    (size,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + size])
    header["__metadata__"]["tokens_seen"] = "51"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + size :])
    with pytest.raises(kvtool.KvtoolError, match="checksum"):
        kvtool.load_cache(path, model)


def test_another_model_other_weights_or_another_dtype_is_refused(saved):
    model, path = saved
    with pytest.raises(kvtool.KvtoolError, match="another model"):
        kvtool.load_cache(path, peaky_model("llama", rms_norm_eps=1e-3))
    with torch.no_grad():
        model.model.norm.weight += 0.5
    with pytest.raises(kvtool.KvtoolError, match="other weights or another dtype"):
        kvtool.load_cache(path, model)
    with torch.no_grad():
        model.model.norm.weight -= 0.5
    kvtool.load_cache(path, model)
    with pytest.raises(kvtool.KvtoolError, match="other weights or another dtype"):
        kvtool.load_cache(path, model.to(torch.bfloat16))


def test_one_changed_number_of_one_weight_is_refused(saved):
    """Wherever it is in the tensor, and after the model has been hashed."""
    model, path = saved
    kvtool.load_cache(path, model)
    weight = model.model.layers[1].mlp.down_proj.weight.data
    for place in ((0, 0), (-1, -1), (7, 9)):
        before = weight[place].clone()
        weight[place] += 0.5
        with pytest.raises(kvtool.KvtoolError, match="other weights or another dtype"):
            kvtool.load_cache(path, model)
        weight[place] = before
        kvtool.load_cache(path, model)


def test_a_file_without_the_hash_of_all_weights_still_loads_with_its_model(saved):
    model, path = saved
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    assert len(metadata.pop("weights_hash")) == 64
    metadata |= {"weights_sha256": "0" * 64}  # of every byte, as files had it once
    metadata.pop("sha256")
    save_file(tensors, path, metadata | {"sha256": digest_of(tensors, metadata)})
    kvtool.load_cache(path, model)
    with torch.no_grad():
        model.model.norm.weight += 0.5
    with pytest.raises(kvtool.KvtoolError, match="other weights or another dtype"):
        kvtool.load_cache(path, model)


def test_a_stranger_and_a_later_schema_are_refused(saved, tmp_path):
    model = saved[0]
    save_file({"a": torch.zeros(1)}, tmp_path / "b.safetensors")
    with pytest.raises(kvtool.KvtoolError, match="not a kvtool cache file"):
        kvtool.load_cache(tmp_path / "b.safetensors", model)
    save_file(
        {"a": torch.zeros(1)},
        tmp_path / "c.safetensors",
        {"kind": "kvtool.cache", "schema_version": "9"},
    )
    with pytest.raises(kvtool.KvtoolError, match="schema version 9; this kvtool reads 1"):
        kvtool.load_cache(tmp_path / "c.safetensors", model)
    with pytest.raises(kvtool.KvtoolError, match="no cache file at"):
        kvtool.load_cache(tmp_path / "none.safetensors", model)


def test_an_empty_cache_is_not_saved(saved, tmp_path):
    model, _ = saved
    empty = kvtool.build_cache(model, "h2o", 20)
    with pytest.raises(kvtool.KvtoolError, match="the cache is empty"):
        kvtool.save_cache(empty, tmp_path / "d.safetensors", model=model, input_ids=random_ids(3))
    assert not (tmp_path / "d.safetensors").exists()


def test_a_cache_saved_by_itself_takes_a_further_turn(tmp_path):
    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, "tova", 20)
    prefill(model, cache, random_ids(50))
    kvtool.save_cache(cache, tmp_path / "a.safetensors")
    loaded = kvtool.load_cache(tmp_path / "a.safetensors", model)
    assert loaded.input_ids is None
    turn = random_ids(9, seed=3)
    torch.testing.assert_close(prefill(model, loaded, turn), prefill(model, cache, turn))
    del model
    gone = kvtool.build_cache(kvtool.attach(peaky_model("llama")), "tova", 20)
    for layer in gone.layers:
        layer.count_from(1, None)
    with pytest.raises(kvtool.KvtoolError, match="is gone; pass it as `model`"):
        kvtool.save_cache(gone, tmp_path / "b.safetensors")


@pytest.mark.filterwarnings("ignore")  # torch.ao.quantization is to move
def test_a_cache_of_a_model_with_int8_layers_is_saved_and_loaded(tmp_path):
    plain = peaky_model("llama")
    model = kvtool.attach(torch.ao.quantization.quantize_dynamic(plain, {torch.nn.Linear}))
    cache = kvtool.build_cache(model, "h2o", 20)
    logits = prefill(model, cache, random_ids(50))
    path = tmp_path / "a.safetensors"
    kvtool.save_cache(cache, path, input_ids=random_ids(50), next_logits=logits)
    loaded = kvtool.load_cache(path, model)
    tokens = random_ids(4, seed=1)[0][:, None]
    torch.testing.assert_close(feed(model, loaded, tokens), feed(model, cache, tokens))
