"""A cache that scores by logits: against a slow twin, in batches, turns, files, beams."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvtool
from kvtool.cache.features.surprisal import Surprisals
from kvtool.generation import compress, decode_step, prefill, token_logprobs
from tests.models_for_tests import anchored_model, family_model, peaky_model, prompt, random_ids
from tests.reference.sirllm import SlowSirLLM

pytestmark = pytest.mark.few(2)  # every policy goes through tests/contract

SETTINGS = {"max_new_tokens": 12, "do_sample": False}


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


@pytest.mark.few(4)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gptj"])
@pytest.mark.parametrize(
    ("options", "mode", "size"),
    [
        ({}, "full", 10),  # at most half of the budget
        ({"sinks": 1, "recent": 6}, "block:7", 7),
        ({"sinks": 0, "decay": 0.7}, "block:12", 10),
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
        for token in prompt(14, seed=9 + turn)[1:]:
            expected = slow.feed([token])
            logits = decode_step(model, cache, torch.tensor([token]))[0]
            compare(slow, cache, logits, expected, layers)


@pytest.mark.parametrize("family", ["llama"])
@pytest.mark.parametrize("chunks", [None, 16, 3])
def test_transformers_own_generate_equals_the_slow_twin(family, chunks):
    """The whole prompt in one forward is larger than the budget, and is cut to it afterwards."""
    alone, model = attached(family)
    slow, ids = SlowSirLLM(alone, 20, sinks=2), prompt(45)
    for block in blocks(ids, chunks or 45):
        expected = slow.feed(block)
    tokens = []
    for _ in range(12):
        tokens.append(int(expected.argmax()))
        expected = slow.feed(tokens[-1:])
    cache = kvtool.build_cache(model, "sirllm(sinks=2)", 20)
    settings = SETTINGS | {"max_new_tokens": 13, "prefill_chunk_size": chunks}
    out = model.generate(torch.tensor([ids]), past_key_values=cache, **settings)
    assert out[0, 45:-1].tolist() == tokens
    assert cache.kept_positions(1)[0, 0].tolist() == slow.kept
    assert all(layer.slots.capacity <= 21 for layer in cache.layers)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"prefill_chunk_size": 16}])
def test_a_budget_that_fits_is_the_full_cache(model, settings):
    ids, mask = random_ids(50, batch=2), torch.ones(2, 50, dtype=torch.long)
    mask[1, :19] = 0
    cache = kvtool.build_cache(model, "sirllm", 512)
    settings = SETTINGS | settings | {"attention_mask": mask}
    ours = model.generate(ids, past_key_values=cache, **settings)
    assert ours.tolist() == peaky_model("llama").generate(ids, **settings).tolist()


def test_beams_are_the_texts_that_they_hold(model):
    texts, order = random_ids(40, batch=3), [2, 0, 2]
    batch = kvtool.build_cache(model, "sirllm", 20)
    prefill(model, batch, texts)
    alone = [kvtool.build_cache(model, "sirllm", 20) for _ in order]
    for row, cache in zip(order, alone, strict=True):
        prefill(model, cache, texts[row : row + 1])
    for step, token in enumerate(random_ids(12, seed=3)[0]):
        if step == 5:
            batch.reorder_cache(torch.tensor(order))
        logits = decode_step(model, batch, token.repeat(3))
        for i, cache in enumerate(alone):
            expected = decode_step(model, cache, token[None])[0]
            if step >= 5:
                torch.testing.assert_close(logits[i], expected, atol=1e-4, rtol=1e-4)
                assert torch.equal(batch.kept_positions(1)[i], cache.kept_positions(1)[0])


@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("budget", [20, 0.4])
def test_padded_rows_in_two_turns_are_the_rows_alone(model, budget, decay):
    policy = f"sirllm(sinks=1,recent=1,decay={decay})"
    rows = [[random_ids(n, seed=n) for n in turn] for turn in ((60, 37, 11), (9, 30, 21))]
    both = kvtool.build_cache(model, policy, budget)
    alone = [kvtool.build_cache(model, policy, budget) for _ in range(3)]
    for turn in rows:
        width = max(row.shape[1] for row in turn)
        ids, mask = torch.zeros(2, 3, width, dtype=torch.long)
        for i, row in enumerate(turn):
            ids[i, -row.shape[1] :], mask[i, -row.shape[1] :] = row[0], 1
        together = [prefill(model, both, ids, mask)]
        new = random_ids(6, seed=width, batch=3)
        together += [decode_step(model, both, tokens) for tokens in new.T]
        for i, (row, cache) in enumerate(zip(turn, alone, strict=True)):
            expected = [prefill(model, cache, row)]
            expected += [decode_step(model, cache, token[None]) for token in new[i]]
            ours = torch.stack([logits[i] for logits in together])
            torch.testing.assert_close(ours, torch.cat(expected), atol=3e-4, rtol=3e-4)
            kept = cache.kept_positions(0)[0]
            assert torch.equal(both.kept_positions(0)[i, :, : kept.shape[1]], kept)


def test_a_saved_cache_of_padded_rows_goes_on(model, tmp_path):
    ids, mask = random_ids(40, batch=2), torch.ones(2, 40, dtype=torch.long)
    mask[0, :22] = 0
    cache = kvtool.build_cache(model, "sirllm(sinks=1)", 0.5)
    prefill(model, cache, ids, mask)
    for tokens in random_ids(5, seed=3, batch=2).T:
        decode_step(model, cache, tokens)
    kvtool.save_cache(cache, tmp_path / "a.safetensors", model=model)
    loaded = kvtool.load_cache(tmp_path / "a.safetensors", model)
    turn = random_ids(17, seed=5, batch=2)
    torch.testing.assert_close(prefill(model, loaded, turn), prefill(model, cache, turn))
    for layer in range(2):
        assert torch.equal(loaded.kept_positions(layer), cache.kept_positions(layer))


def test_a_copy_and_a_reset(model):
    cache = kvtool.build_cache(model, "sirllm", 20)
    compress(model, cache, random_ids(50))
    copy, step = cache.copy(), torch.tensor([7])
    first = decode_step(model, cache, step)
    for token in (9, 9, 3):
        decode_step(model, cache, torch.tensor([token]))
    assert torch.equal(decode_step(model, copy, step), first)
    cache.reset()
    fresh = kvtool.build_cache(model, "sirllm", 20)
    ids = random_ids(50, seed=2)
    assert torch.equal(prefill(model, cache, ids), prefill(model, fresh, ids))
    assert torch.equal(cache.kept_positions(1), fresh.kept_positions(1))


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


def test_a_budget_in_bytes(model):
    """22 slots of 2 x (256 + 8) bytes and 4 for their surprisal, and 96 logits of 4."""
    size = 22 * (2 * 264 + 4) + 96 * 4
    cache = kvtool.build_cache(model, "sirllm", f"{size}B")
    prefill(model, cache, random_ids(200))
    report = cache.report()
    assert report.kept_per_layer == [21, 21]
    assert report.allocated_bytes + report.state_bytes == size


@pytest.mark.parametrize("chunk", [1, 8, 40])
def test_scoring_a_text_holds_the_budget(model, chunk):
    cache = kvtool.build_cache(model, "sirllm", 20)
    logprobs, _ = token_logprobs(model, cache, random_ids(60), chunk=chunk)
    assert logprobs.shape == (1, 59)
    assert cache.report().kept_per_layer == [20, 20]


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
        for tokens in random_ids(14, seed=1, batch=2).T:
            decode_step(model, cache, tokens)
    assert cache.kept_positions(0).shape[-1] == 20
