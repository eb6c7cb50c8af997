"""Transformers' own generate over a kvtool cache: sampling, beams, turns, chunks, guards."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import DynamicCache

import kvtool
from kvtool.generation import prefill
from tests.models_for_tests import family_model, peaky_model, random_ids

SETTINGS = {"max_new_tokens": 7, "do_sample": False}


@pytest.fixture
def model():
    return kvtool.attach(peaky_model("llama"))


@pytest.mark.parametrize(  # beams go through tests/contract
    "settings",
    [
        {"num_return_sequences": 2, "num_beams": 2},
        {"do_sample": True, "temperature": 0.8, "top_k": 20, "num_return_sequences": 3},
        {"prefill_chunk_size": 16, "repetition_penalty": 1.3},
    ],
    ids=",".join,
)
def test_with_a_budget_that_fits_every_mode_gives_what_sdpa_gives(model, settings):
    ids, other = random_ids(50, batch=2), peaky_model("llama")
    cache = kvtool.build_cache(model, "h2o+caote", 512)
    torch.manual_seed(3)
    ours = model.generate(ids, past_key_values=cache, **(SETTINGS | settings))
    torch.manual_seed(3)
    assert ours.tolist() == other.generate(ids, **(SETTINGS | settings)).tolist()


def test_a_second_turn_on_the_same_cache(model):
    ids, more = random_ids(40), random_ids(9, seed=4)
    cache = kvtool.build_cache(model, "tova", 512)
    first = model.generate(ids, past_key_values=cache, **SETTINGS)
    text = torch.cat([first, more], 1)
    second = model.generate(text, past_key_values=cache, **SETTINGS)
    assert second.tolist() == peaky_model("llama").generate(text, **SETTINGS).tolist()


def test_threads_do_not_meet(model):
    texts = [random_ids(40 + 5 * i, seed=i) for i in range(3)]
    expected, found = [], [None] * 3
    for ids in texts:
        cache = kvtool.build_cache(model, "h2o", 20)
        expected.append(model.generate(ids, past_key_values=cache, **SETTINGS).tolist())

    def work(i):
        cache = kvtool.build_cache(model, "h2o", 20)
        found[i] = model.generate(texts[i], past_key_values=cache, **SETTINGS).tolist()

    workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == expected


@pytest.mark.parametrize(
    ("family", "with_cache"), [("llama", False), ("gemma2", True), ("gpt_oss", True)]
)
def test_an_attached_model_still_runs_without_a_kvtool_cache(family, with_cache):
    settings = {"use_cache": with_cache, "max_new_tokens": 4, "do_sample": False}
    model = family_model(family)
    ids, mask = random_ids(40, batch=2), torch.ones(2, 40, dtype=torch.long)
    mask[0, :13] = 0
    expected = model.generate(ids, attention_mask=mask, **settings)
    kvtool.attach(model)
    cache = DynamicCache(config=model.config) if with_cache else None
    ours = model.generate(ids, attention_mask=mask, past_key_values=cache, **settings)
    assert ours.tolist() == expected.tolist()


def test_a_model_that_is_not_attached_is_told(model):
    cache = kvtool.build_cache(model, "h2o", 20)
    kvtool.detach(model)
    with pytest.raises(kvtool.KvtoolError, match="does not run kvtool's attention"):
        model.generate(random_ids(50), past_key_values=cache, **SETTINGS)


def test_gradients_are_never_recorded(model):
    cache = kvtool.build_cache(model, "h2o+caote", 20)
    model(random_ids(50), past_key_values=cache)
    assert not any(layer.keys.requires_grad for layer in cache.layers)


def test_half_precision_runs(model):
    model.to(torch.bfloat16)
    for policy in ("h2o+caote", "tova", "snapkv(window=4)"):
        cache = kvtool.build_cache(model, policy, 20, prefill="block:16")
        assert prefill(model, cache, random_ids(50)).isfinite().all()
        assert cache.layers[0].keys.dtype == torch.bfloat16
        assert all(number.dtype == torch.float32 for number in cache.layers[0].slots.state.values())
