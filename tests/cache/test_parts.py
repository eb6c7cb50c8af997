"""A feature that keeps a number for each batch entry is one class: everything else is loops."""

import pytest
import torch
from safetensors.torch import load_file

import kvtool
from kvtool.cache.features import table
from kvtool.cache.features.cache_part import CachePart
from kvtool.cache.slots.part import Part, tensor_bytes
from kvtool.generation import decode_step, prefill
from tests.models_for_tests import peaky_model, random_ids


class Names(Part):
    """A number that distinguishes batch entries."""

    name = "names"

    def __init__(self):
        self.clear()

    @classmethod
    def make(cls, site):
        return cls()

    def begin(self, batch, kv_heads, device):
        self.numbers = torch.arange(batch, device=device)

    def clear(self):
        self.numbers = None

    def reindex(self, change):
        self.numbers = change(self.numbers)

    def tensors(self):
        return {"names": self.numbers}

    def check(self, file, prefix, shape, dtype):
        file.take(f"{prefix}names", (file.batch,), torch.int64)

    def load(self, tensors, device):
        self.numbers = tensors["names"]

    @property
    def nbytes(self):
        return tensor_bytes([self.numbers])


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama"))


@pytest.fixture
def cache(model, monkeypatch):
    monkeypatch.setattr(table, "FEATURES", (*table.FEATURES, Names))
    cache = kvtool.build_cache(model, "h2o", 20)
    prefill(model, cache, random_ids(50, batch=3))
    return cache


def names(cache):
    return [Names.of(layer).numbers.tolist() for layer in cache.slot_layers]


def test_it_follows_the_batch_entries(cache):
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert names(cache) == [[2, 0, 1]] * 2
    cache.batch_select_indices(torch.tensor([0, 2]))
    assert names(cache) == [[2, 1]] * 2
    cache.batch_repeat_interleave(2)
    assert names(cache) == [[2, 2, 1, 1]] * 2


def test_it_is_gone_back_to_and_forgotten(cache):
    with cache.rollback():
        cache.reorder_cache(torch.tensor([2, 0, 1]))
        assert names(cache.copy()) == [[2, 0, 1]] * 2
    assert names(cache) == [[0, 1, 2]] * 2
    cache.reset()
    assert [Names.of(layer).numbers for layer in cache.slot_layers] == [None, None]


def test_it_is_saved_loaded_and_checked(model, cache, tmp_path):
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    kvtool.save_cache(cache, tmp_path / "a.safetensors")
    again = kvtool.load_cache(tmp_path / "a.safetensors", model)
    assert names(again) == [[2, 0, 1]] * 2
    assert load_file(tmp_path / "a.safetensors")["layer.1.names"].tolist() == [2, 0, 1]
    Names.of(cache.slot_layers[0]).numbers = torch.zeros(2, dtype=torch.int64)
    kvtool.save_cache(cache, tmp_path / "b.safetensors")
    with pytest.raises(kvtool.KvtoolError, match=r"layer.0.names` is int64 \[2\], not int64 \[3\]"):
        kvtool.load_cache(tmp_path / "b.safetensors", model)


def test_its_bytes_count(cache):
    before = cache.report().state_bytes
    for layer in cache.slot_layers:
        del layer.parts["names"]
    assert before - cache.report().state_bytes == 2 * 3 * 8


class Labels(CachePart):
    """A number of each batch entry, for all layers at once."""

    name = "labels"

    def __init__(self):
        self.numbers, self.seen = torch.arange(3), []

    @classmethod
    def make(cls, layers, policy):
        return cls()

    def clear(self):
        self.numbers = None

    def reindex(self, change):
        self.numbers = change(self.numbers)

    def tensors(self):
        return {"labels": self.numbers}

    def check(self, file, slots, logits, dtype):
        assert slots == 20
        file.take("labels", (file.batch,), torch.int64)

    def load(self, tensors, device):
        self.numbers = tensors["labels"]

    @property
    def nbytes(self):
        return tensor_bytes([self.numbers])

    def begin_block(self, layer):
        self.seen.append(layer.index)


def test_a_part_of_a_whole_cache_goes_with_it(model, monkeypatch, tmp_path):
    plain = kvtool.build_cache(model, "h2o", 20)
    monkeypatch.setattr(table, "OF_CACHES", (*table.OF_CACHES, Labels))
    cache = kvtool.build_cache(model, "h2o", 20)
    for each in (plain, cache):
        prefill(model, each, random_ids(50, batch=3))
    assert Labels.of(plain) is None
    assert Labels.of(cache).seen == [0, 1]
    assert cache.report().state_bytes - plain.report().state_bytes == 3 * 8
    with cache.rollback():
        cache.reorder_cache(torch.tensor([2, 0, 1]))
        assert Labels.of(cache.copy()).numbers.tolist() == [2, 0, 1]
    assert Labels.of(cache).numbers.tolist() == [0, 1, 2]
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    kvtool.save_cache(cache, tmp_path / "a.safetensors")
    again = kvtool.load_cache(tmp_path / "a.safetensors", model)
    assert Labels.of(again).numbers.tolist() == [2, 0, 1]
    Labels.of(cache).numbers = torch.zeros(2, dtype=torch.int64)
    kvtool.save_cache(cache, tmp_path / "b.safetensors")
    with pytest.raises(kvtool.KvtoolError, match=r"`labels` is int64 \[2\], not int64 \[3\]"):
        kvtool.load_cache(tmp_path / "b.safetensors", model)
    cache.reset()
    assert Labels.of(cache).numbers is None


def test_bytes_are_counted_where_buffers_grow_and_shrink(model):
    for policy in ("full", "snapkv(window=4)+ada", "d2o", "quest", "h2o+calidrop"):
        budget = None if policy == "full" else 20
        cache = kvtool.build_cache(model, policy, budget, prefill="block:16")

        def check(cache=cache):
            assert cache.meter.held == cache.report().allocated_bytes

        check()
        prefill(model, cache, random_ids(50, batch=2), new_tokens=3)
        check()
        for token in range(5):
            decode_step(model, cache, torch.tensor([token, token]))
            check()
        prefill(model, cache, random_ids(30, batch=2))
        check()
        if policy != "quest":
            cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_select_indices(torch.tensor([0]))
        check()
        with cache.rollback():
            decode_step(model, cache, torch.tensor([5]))
            check()
        check()
        cache.reset()
        check()
        assert cache.meter.held == 0
