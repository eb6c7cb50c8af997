"""Every family: exact where the budget fits, bounded where not, refused where it cannot work."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, DynamicCache

import kvtool
from kvtool.cache.hooks.families import check_supported, notes
from kvtool.generation import decode_step, prefill
from tests.models_for_tests import FAMILIES, family_model, random_ids
from tests.tiers import first

RUNS = [  # no weights, all of them, the last queries' and the logits of the model
    ("streaming", "full"),
    ("h2o+caote", "block:16"),
    ("snapkv(window=8)", "full"),
    ("sirllm", "block:16"),
]
LENGTH, NEW = 60, 4
MAIN = ["gemma3", "deepseek_v3", "lfm2"]  # windows, latents and a recurrence


def run(model, cache):
    tokens = random_ids(NEW, seed=1)[0]
    steps = [prefill(model, cache, random_ids(LENGTH))]
    return torch.stack([*steps, *(decode_step(model, cache, token[None]) for token in tokens)])


@pytest.mark.parametrize("family", first(3, dict.fromkeys([*MAIN, *FAMILIES])))
def test_a_budget_that_fits_gives_the_full_caches_logits_and_a_small_one_holds(family):
    model = family_model(family)
    cache, tokens = DynamicCache(config=model.config), random_ids(NEW, seed=1)[0]
    with torch.no_grad():
        steps = [model(random_ids(LENGTH), past_key_values=cache).logits[:, -1]]
        for token in tokens:
            steps.append(model(token.view(1, 1), past_key_values=cache).logits[:, -1])
    expected = torch.stack(steps)
    kvtool.attach(model)
    for policy, mode in RUNS:
        ours = run(model, kvtool.build_cache(model, policy, 512, prefill=mode))
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
        cache = kvtool.build_cache(model, policy, 20, prefill=mode)
        assert run(model, cache).isfinite().all()
        for layer in cache.slot_layers:
            limit = 20 if layer.window is None else layer.window - 1
            generated = NEW if policy.startswith("snapkv") and layer.window is None else 0
            assert layer.slots.kept == limit + generated
            if not generated:
                assert layer.keys.shape[2] == layer.values.shape[2] == limit + 1


@pytest.mark.parametrize(
    "family",
    first(2, ["gemma2", "deepseek_v3", "llama4", "gpt_oss", "falcon", "gemma4", "gpt_neox"]),
)
def test_padded_rows_are_the_rows_alone(family):
    model = kvtool.attach(family_model(family))
    lengths, new = (41, 23, 7), random_ids(4, seed=2, batch=3)
    ids, mask = torch.zeros(3, 41, dtype=torch.long), torch.zeros(3, 41, dtype=torch.long)
    rows = [random_ids(length, seed=length) for length in lengths]
    for i, row in enumerate(rows):
        ids[i, 41 - lengths[i] :], mask[i, 41 - lengths[i] :] = row[0], 1
    for policy, mode in (("h2o+caote", "block:16"), ("snapkv(window=3)", "full")):
        both = kvtool.build_cache(model, policy, 12, prefill=mode)
        together = [prefill(model, both, ids, mask)]
        together += [decode_step(model, both, token) for token in new.T]
        for i, row in enumerate(rows):
            one = kvtool.build_cache(model, policy, 12, prefill=mode)
            alone = [prefill(model, one, row)]
            alone += [decode_step(model, one, token[None]) for token in new[i]]
            ours = torch.stack([step[i] for step in together])
            torch.testing.assert_close(ours, torch.cat(alone), atol=2e-4, rtol=2e-4)


REFUSED = [
    ("bloom", {}, "bias by the index of a key"),
    ("falcon", {"alibi": True}, "bias by the index of a key"),
    ("deepseek_v32", {}, "selects keys by their index"),
    ("mamba2", {}, "no attention layers"),
    ("t5", {}, "encoder-decoder"),
    ("jetmoe", {}, "deals its KV heads out"),
    ("minimax", {}, "a cache class of its own"),
    ("mllama_text_model", {}, "keys of images beside its text"),
    ("inkling_text", {}, "bias by a key's distance"),
]


def test_what_cannot_work_is_refused():
    for kind, changes, reason in REFUSED:
        config = AutoConfig.for_model(kind, **changes)
        with pytest.raises(kvtool.KvtoolError, match=reason) as caught:
            check_supported(config)
        assert "\n" not in str(caught.value), kind


def test_attach_refuses_before_anything_changes():
    config = AutoConfig.for_model("bloom", hidden_size=32, n_layer=1, n_head=2, vocab_size=50)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    before = model.config._attn_implementation
    with pytest.raises(kvtool.KvtoolError, match="bloom"):
        kvtool.attach(model)
    assert model.config._attn_implementation == before


def test_what_a_family_limits_is_said():
    assert notes(family_model("llama").config) == []
    assert "eager attention" in notes(family_model("falcon").config)[0]
    assert "2 of 4 layers" in notes(family_model("gemma3").config)[0]
    assert "nothing to evict" in notes(family_model("mistral-window").config)[0]


@pytest.mark.parametrize(("policy", "budget"), [("rocketkv", 20), ("h2o", "50%")])
def test_a_model_whose_every_layer_has_a_window_takes_a_budget_that_bounds_nothing(policy, budget):
    """`kvzip` has a test of its own."""
    model, ids = kvtool.attach(family_model("mistral-window")), random_ids(64)
    cache, full = kvtool.build_cache(model, policy, budget), kvtool.build_cache(model, "full")
    assert torch.equal(prefill(model, cache, ids), prefill(model, full, ids))


@pytest.mark.parametrize("family", ["falcon", "llama"])
def test_detach_takes_the_hooks_away(family):
    model = family_model(family)
    kvtool.detach(kvtool.attach(model))
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("family", first(2, ["llama", "falcon_h1", "gemma3n"]))
def test_a_cache_that_is_not_to_be_used_is_refused(family):
    """Transformers' generate would feed it the whole text at every step."""
    model = kvtool.attach(family_model(family))
    ids = random_ids(30)
    for policy in ("h2o", "sirllm"):
        cache = kvtool.build_cache(model, policy, 20)
        settings = {"past_key_values": cache, "use_cache": False}
        calls = (
            lambda settings=settings: model.generate(ids, max_new_tokens=3, **settings),
            lambda settings=settings: model(ids, **settings),
            lambda settings=settings: model.get_decoder()(ids, **settings),
        )
        for call in calls:
            with pytest.raises(
                kvtool.UsageError, match=r"use_cache=False .* a kvtool cache"
            ) as told:
                call()
            assert "use_cache=True" in told.value.hint
        assert cache.get_seq_length() == 0
        fresh = kvtool.build_cache(model, policy, 20)
        torch.testing.assert_close(prefill(model, cache, ids), prefill(model, fresh, ids))
    model(ids, use_cache=False)  # without a cache nothing is checked


def test_an_eager_family_may_be_loaded_with_another_attention():
    model = family_model("falcon")
    ids = random_ids(LENGTH)
    expected = prefill(kvtool.attach(model), kvtool.build_cache(model, "h2o", 20), ids)
    kvtool.detach(model)
    model.config._attn_implementation = "sdpa"  # what transformers loads it with by itself
    ours = prefill(kvtool.attach(model), kvtool.build_cache(model, "h2o", 20), ids)
    torch.testing.assert_close(ours, expected)
    assert kvtool.detach(model).config._attn_implementation == "sdpa"
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(kvtool.KvtoolError, match="`falcon` was loaded with flash_attention_2"):
        kvtool.attach(model)


def test_an_eager_family_cannot_split_a_prompt_by_itself():
    model = kvtool.attach(family_model("falcon"))
    cache = kvtool.build_cache(model, "h2o", 20, prefill="block:16")
    with pytest.raises(kvtool.KvtoolError, match="cannot be split inside eager attention"):
        model(random_ids(60), past_key_values=cache)
