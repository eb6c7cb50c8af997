"""A forward that breaks off inside: the cache that it leaves is refused, and one to go back to is
not."""

from contextlib import suppress

import pytest
import torch

import kvtool
from kvtool.cache.hooks import attention
from kvtool.cache.whole import cache as caches
from kvtool.generation import compress, decode_step, prefill
from kvtool.generation.graphs import StaticDecoding
from tests.models_for_tests import family_model, peaky_model, random_ids

TORN = "the last forward over this cache was interrupted"
POLICIES = ["full", "h2o+ada", "sirllm", "quest", "h2o+d2o-alloc"]


def make(policy="h2o", family="llama", **options):
    model = kvtool.attach(peaky_model("llama") if family == "llama" else family_model(family))
    return model, kvtool.build_cache(model, policy, None if policy == "full" else 24, **options)


class Interrupting:
    """Ctrl-C in the middle of the next forward: at the entry of one of the model's modules."""

    def __init__(self, model, place):
        self.module = model.get_submodule(place)

    def __enter__(self):
        self.hook = self.module.register_forward_pre_hook(self.interrupt)

    def interrupt(self, *_):
        raise KeyboardInterrupt

    def __exit__(self, kind, error, trace):
        self.hook.remove()
        assert kind is KeyboardInterrupt
        return True


def places(family):
    inside = {
        "gptj": ("transformer.h.1", "transformer.ln_f"),
        "falcon_h1": ("model.layers.1", "model.final_layernorm"),
        "lfm2": ("model.layers.1", "model.embedding_norm"),
    }
    return inside.get(family, ("model.layers.1", "model.norm"))


@pytest.mark.parametrize(
    ("family", "place"), [("llama", 0), ("llama", 1), ("falcon_h1", 0), ("lfm2", 1), ("gptj", 0)]
)
def test_a_decode_step_that_broke_off_is_not_gone_on_from(family, place):
    model, cache = make(family=family)
    prefill(model, cache, random_ids(50))
    with Interrupting(model, places(family)[place]):
        decode_step(model, cache, torch.tensor([5]))
    with pytest.raises(kvtool.KvtoolError, match=TORN) as caught:
        decode_step(model, cache, torch.tensor([5]))
    assert "cache.reset()" in caught.value.hint
    with pytest.raises(kvtool.KvtoolError, match=TORN):
        prefill(model, cache, random_ids(9))


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_the_policy_a_prompt_that_broke_off_is_refused_and_an_emptied_cache_is_good(
    policy,
):
    model, cache = make(policy)
    with Interrupting(model, "model.layers.1"):
        prefill(model, cache, random_ids(50))
    with pytest.raises(kvtool.KvtoolError, match=TORN):
        model.generate(random_ids(9), past_key_values=cache, max_new_tokens=2)
    cache.reset()
    _, fresh = make(policy)
    assert torch.equal(prefill(model, cache, random_ids(50)), prefill(model, fresh, random_ids(50)))


def test_a_policy_that_goes_by_logits_is_torn_until_it_has_seen_them():
    model, cache = make("sirllm")
    prefill(model, cache, random_ids(50))
    with Interrupting(model, "lm_head"):
        decode_step(model, cache, torch.tensor([5]))
    with pytest.raises(kvtool.KvtoolError, match=TORN):
        decode_step(model, cache, torch.tensor([5]))


def test_inside_the_attention_of_the_last_layer(monkeypatch):
    model, cache = make()
    prefill(model, cache, random_ids(50))

    def attend(layer, *rest):
        if layer.index == 1:
            raise MemoryError
        return attention_step(layer, *rest)

    attention_step = attention.run_step
    monkeypatch.setattr(attention, "run_step", attend)
    with pytest.raises(MemoryError):
        decode_step(model, cache, torch.tensor([5]))
    monkeypatch.undo()
    with pytest.raises(kvtool.KvtoolError, match=TORN):
        decode_step(model, cache, torch.tensor([5]))


def test_between_the_blocks_of_a_prompt():
    model, cache = make(prefill="block:10")

    def stop(*_):
        if cache.get_seq_length() == 30:
            raise KeyboardInterrupt

    hook = model.register_forward_pre_hook(stop)
    with suppress(KeyboardInterrupt):
        prefill(model, cache, random_ids(50))
    hook.remove()
    assert cache.tokens_seen() == [30]
    with pytest.raises(kvtool.KvtoolError, match=TORN):
        prefill(model, cache, random_ids(20))


def test_a_cache_to_go_back_to_is_whole():
    model, cache = make("h2o+caote")
    never = make("h2o+caote")[1]
    for each in (cache, never):
        prefill(model, each, random_ids(50))
    with Interrupting(model, "model.layers.1"), cache.rollback():
        decode_step(model, cache, torch.tensor([5]))
    step = torch.tensor([7])
    assert torch.equal(decode_step(model, cache, step), decode_step(model, never, step))


def test_what_fails_before_anything_is_stored_tears_nothing():
    model, cache = make()
    never = make()[1]
    for each in (cache, never):
        prefill(model, each, random_ids(50))
    with pytest.raises(IndexError):
        decode_step(model, cache, torch.tensor([10_000]))  # no such token
    step = torch.tensor([7])
    assert torch.equal(decode_step(model, cache, step), decode_step(model, never, step))


def test_a_torn_cache_is_not_saved(tmp_path):
    model, cache = make()
    with Interrupting(model, "model.layers.1"):
        compress(model, cache, random_ids(50))
    with pytest.raises(kvtool.KvtoolError, match=TORN):
        kvtool.save_cache(cache, tmp_path / "a.st")
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_a_compiled_step_that_broke_off(monkeypatch):
    model, cache = make()
    prefill(model, cache, random_ids(50))
    for token in (3, 4):
        decode_step(model, cache, torch.tensor([token]))
    step = StaticDecoding(model, 8, backend="eager", compiled=True)
    step(model, cache, torch.tensor([2]))
    assert not cache.changing

    def broken(**inputs):
        cache.slot_layers[0].keys.zero_()
        raise KeyboardInterrupt

    monkeypatch.setattr(step, "_forward", broken)
    with suppress(KeyboardInterrupt):
        step(model, cache, torch.tensor([2]))
    monkeypatch.undo()
    with pytest.raises(kvtool.KvtoolError, match=TORN):
        step(model, cache, torch.tensor([2]))


def test_a_forward_without_a_cache_takes_nothing_over_from_one_that_broke_off(monkeypatch):
    model, cache = make("full")
    alone = model(random_ids(30)).logits
    give = caches.set_pending

    def stop(taken):
        give(taken)
        raise KeyboardInterrupt

    monkeypatch.setattr(caches, "set_pending", stop)
    with suppress(KeyboardInterrupt):
        prefill(model, cache, random_ids(30))
    monkeypatch.undo()
    assert torch.equal(model(random_ids(30), use_cache=False).logits, alone)
