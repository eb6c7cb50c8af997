"""A cache that scores by logits: against a slow twin, in batches, turns, files, beams."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvtool
from kvtool.cache.features.surprisal import Surprisals
from kvtool.generation import decode_step, prefill
from tests.models_for_tests import anchored_model, family_model, peaky_model, prompt, random_ids
from tests.reference.sirllm import SlowSirLLM

pytestmark = pytest.mark.few(2)  # every policy goes through tests/contract

SETTINGS = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def model():
    return kvtool.attach(peaky_model("llama"))


def attached(family):
    """A model of its own for the twin, and the same one attached."""
    if family == "gemma2":  # soft-capped attention and soft-capped final logits
        layers = ["full_attention"] * 2
        settings = {"layer_types": layers, "final_logit_softcapping": 3.0}
        twins = [peaky_model("gemma2", "eager", **settings) for _ in range(2)]
    elif family in ("llama", "qwen3"):
        twins = [kvtool.detach(anchored_model(family)), peaky_model(family)]
        twins[1] = type(twins[0])(twins[0].config).eval()
        twins[1].load_state_dict(twins[0].state_dict())
    else:
        twins = [family_model(family), family_model(family)]
    return twins[0], kvtool.attach(twins[1])


def blocks(ids, size):
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def compare(slow, cache, logits, expected, layers):
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    for layer in range(layers):
        for head in cache.kept_positions(layer)[0]:
            assert head.tolist() == slow.kept
    scores, _ = Surprisals.of(cache).by_position()
    expected = torch.tensor([slow.surprisal[p] for p in slow.kept])
    torch.testing.assert_close(scores[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "options", "mode", "size"),
    [
        ("llama", {}, "full", 10),  # at most half of the budget
        ("qwen3", {"sinks": 1, "recent": 6}, "block:7", 7),
        ("gemma2", {"sinks": 0, "decay": 0.7}, "block:12", 10),
        ("gptj", {"sinks": 1, "recent": 6}, "block:7", 7),
    ],
)
def test_two_turns_equal_the_slow_twin(family, options, mode, size):
    alone, model = attached(family)
    layers = model.config.num_hidden_layers
    slow = SlowSirLLM(alone, 20, **options)
    inside = ",".join(f"{name}={value}" for name, value in options.items())
    cache = kvtool.build_cache(model, f"sirllm({inside})", 20, prefill=mode)
    for turn, length in enumerate((45, 23)):
        ids = prompt(length, seed=turn)
        slow.begin_turn()
        for block in blocks(ids, size):
            expected = slow.feed(block)
        logits = prefill(model, cache, torch.tensor([ids]))[0]
        compare(slow, cache, logits, expected, layers)
        for token in prompt(7, seed=9 + turn)[1:]:
            expected = slow.feed([token])
            logits = decode_step(model, cache, torch.tensor([token]))[0]
            compare(slow, cache, logits, expected, layers)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama"])
@pytest.mark.parametrize("chunks", [16, None])
def test_transformers_own_generate_equals_the_slow_twin(family, chunks):
    """The whole prompt in one forward is larger than the budget, and is cut to it afterwards."""
    alone, model = attached(family)
    slow, ids = SlowSirLLM(alone, 20, sinks=2), prompt(45)
    for block in blocks(ids, chunks or 45):
        expected = slow.feed(block)
    tokens = []
    for _ in range(6):
        tokens.append(int(expected.argmax()))
        expected = slow.feed(tokens[-1:])
    cache = kvtool.build_cache(model, "sirllm(sinks=2)", 20)
    settings = SETTINGS | {"max_new_tokens": 7, "prefill_chunk_size": chunks}
    out = model.generate(torch.tensor([ids]), past_key_values=cache, **settings)
    assert out[0, 45:-1].tolist() == tokens
    assert cache.kept_positions(1)[0, 0].tolist() == slow.kept
    assert all(layer.slots.capacity <= 21 for layer in cache.layers)


def test_all_layers_together_take_four_bytes_a_token(model):
    cache = kvtool.build_cache(model, "sirllm", 20)
    prefill(model, cache, random_ids(50))
    for token in random_ids(9, seed=1)[0]:
        decode_step(model, cache, token[None])
    slots = 21
    positions = 2 * 2 * slots * 4  # layers, heads
    assert cache.report().state_bytes == positions + slots * 4 + 96 * 4  # and the next logits
    assert cache.report().allocated_bytes == 2 * 2 * slots * 16 * 2 * 4


def test_a_long_prompt_never_needs_all_its_logits(model, monkeypatch):
    widths = []
    own = model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda x: widths.append(x.shape[1]) or own(x))
    cache = kvtool.build_cache(model, "sirllm", 512)
    prefill(model, cache, random_ids(300))
    assert widths == [128, 128, 44]
    cache = kvtool.build_cache(model, "sirllm", 40, prefill="block:64")
    widths.clear()
    prefill(model, cache, random_ids(50))
    assert widths == [20, 20, 10]


def test_the_caller_gets_the_logits_that_it_asked_for(model):
    ids = random_ids(30)
    whole = model(ids, past_key_values=kvtool.build_cache(model, "sirllm", 64)).logits
    assert whole.shape == (1, 30, 96)
    for asked in (1, 5, torch.tensor([0, 29])):
        cache = kvtool.build_cache(model, "sirllm", 64)
        out = model(ids, past_key_values=cache, logits_to_keep=asked).logits
        places = asked if isinstance(asked, torch.Tensor) else slice(-asked, None)
        assert torch.equal(out, whole[:, places])


def test_inference_mode_and_half_precision(model):
    model.to(torch.bfloat16)
    cache = kvtool.build_cache(model, "sirllm", 20)
    with torch.inference_mode():
        prefill(model, cache, random_ids(50))
        decode_step(model, cache, torch.tensor([3]))
    for token in (5, 6):
        assert decode_step(model, cache, torch.tensor([token])).isfinite().all()
    assert Surprisals.of(cache).table.dtype == torch.float32


def test_what_shows_no_logits_or_tokens_is_refused(model):
    cache = kvtool.build_cache(model, "sirllm", 20)
    with pytest.raises(kvtool.KvtoolError, match="runs a part of it only"):
        model.model(random_ids(30), past_key_values=cache)
    cache = kvtool.build_cache(model, "sirllm", 20)
    embeddings = model.get_input_embeddings()(random_ids(30))
    with pytest.raises(kvtool.KvtoolError, match="has embeddings only"):
        model(inputs_embeds=embeddings, past_key_values=cache)
    with pytest.raises(kvtool.KvtoolError, match="this forward returns none"):
        model(random_ids(30), past_key_values=cache, return_dict=False)


class NoHostReads(TorchDispatchMode):
    """Fails where the host asks for a number of a tensor, which stops a device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function), "a device sync"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("padded", [False, True])
def test_a_decoded_token_costs_no_device_sync(model, padded):
    ids, mask = random_ids(40, batch=2), torch.ones(2, 40, dtype=torch.long)
    mask[1, : 31 * padded] = 0
    cache = kvtool.build_cache(model, "sirllm", 20)
    prefill(model, cache, ids, mask)
    with NoHostReads():
        for tokens in random_ids(3, seed=1, batch=2).T:
            decode_step(model, cache, tokens)
    assert cache.kept_positions(0).shape[-1] == 20
