"""A prompt that several caches read in one run: each ends as it would have alone."""

import pytest
import torch

import kvtool
from kvtool.cache.features.repetition import Instructions, Repetition
from kvtool.cache.steps.attend_block import OwnBlock
from kvtool.errors import UsageError
from kvtool.generation import prefill
from kvtool.generation.feeding import decode_step
from kvtool.generation.shared_prefill import can_share, prefill_shared
from kvtool.sizes import LONG_PROMPT
from tests.models_for_tests import any_cache, family_model, peaky_model, random_ids
from tests.tiers import first

BUDGET, TOKENS, NEW = 48, 90, 5
SHARING = ["gpt_neox", "qwen3", "mistral", "phi3", "olmo2", "qwen3_moe"]  # full attention alone
POLICIES = [
    *("full", "h2o+caote", "roco", "d2o", "rkv", "kvzip", "pyramidinfer", "rocketkv", "sparq"),
    *("snapkv+ada", "h2o+every(steps=4)", "streaming+cam", "snapkv+calidrop", "h2o+int8"),
]
OTHERS = [
    *("scissorhands", "tova", "lagkv", "expected", "triattention(prompt=false)", "duoattention"),
    *("quest", "hsa", "keydiff", "snapkv+chunk", "h2o+d2o-merge", "h2o+calidrop", "d2o+uniform"),
]


def budget(policy):
    return None if policy == "full" else BUDGET


def assert_same(own, other):
    """Both hold the same tokens, bytes and all."""
    assert own.report() == other.report()
    for layer in own.slot_layers:
        held, found = own.kept_positions(layer.index), other.kept_positions(layer.index)
        assert torch.equal(held, found)


@pytest.mark.parametrize("policy", first(len(POLICIES), POLICIES + OTHERS))
def test_a_cache_ends_as_it_would_have_alone(policy):
    model = kvtool.attach(peaky_model("llama"))
    ids = random_ids(TOKENS, batch=2)
    own, other, beside = (any_cache(model, policy, budget(policy)) for _ in range(3))
    assert can_share(model, other, TOKENS)
    # a difference of rounding may move a code by one
    tolerance = 5e-5 if own.policy.codec is None else 1e-2
    alone = prefill(model, own, ids, new_tokens=NEW)
    shared = prefill_shared(model, [other, beside], ids, new_tokens=NEW)
    torch.testing.assert_close(shared, alone, rtol=0, atol=2e-5)
    assert_same(own, other)
    assert_same(own, beside)
    tokens = random_ids(NEW, seed=3, batch=2).unbind(1)
    wanted = [decode_step(model, own, token) for token in tokens]
    for cache in (other, beside):  # one after the other: neither writes into what both have read
        found = [decode_step(model, cache, token) for token in tokens]
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)
        assert_same(own, cache)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "policy", ["kvzip", "kvzip(layers=each)", "kvzip(plus=true)", "kvzip(chunk=40)+int8"]
)
def test_caches_that_repeat_a_prompt_repeat_it_together(policy):
    """Cut to budgets of their own; one is as large as the prompt, and one policy is another."""
    model, ids = kvtool.attach(peaky_model("llama")), random_ids(TOKENS, batch=2)
    budgets, words = (32, BUDGET, TOKENS), Instructions((5, 9), (5, 7))
    alone, together = ([any_cache(model, policy, each) for each in budgets] for _ in range(2))
    beside = [any_cache(model, name, BUDGET) for name in ("h2o", "kvzip(sinks=2)")]
    for cache in (*alone, *together, *beside):
        if Repetition.of(cache) is not None:
            Repetition.of(cache).instruct(words)
    logits = [prefill(model, cache, ids, new_tokens=NEW) for cache in alone]
    runs = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: runs.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assert all(can_share(model, cache, TOKENS) for cache in (*together, *beside))
    shared = prefill_shared(model, [*together, *beside], ids, new_tokens=NEW)
    hook.remove()
    passes = 3 if "chunk=40" in policy else 1
    assert len(runs) == 1 + passes + 1  # the prompt; the policy's passes; those of sinks=2
    tokens = random_ids(NEW, seed=3, batch=2).unbind(1)
    for own, other, expected in zip(alone, together, logits, strict=True):
        torch.testing.assert_close(shared, expected, rtol=0, atol=2e-5)
        assert_same(own, other)
        wanted = [decode_step(model, own, token) for token in tokens]
        found = [decode_step(model, other, token) for token in tokens]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-2 if "int8" in policy else 5e-5)


@pytest.mark.parametrize("family", first(1, SHARING))
def test_families_of_full_attention_share(family):
    model = kvtool.attach(family_model(family))
    ids = random_ids(TOKENS)
    own, other = (any_cache(model, "h2o+caote", BUDGET) for _ in range(2))
    assert can_share(model, other, TOKENS)
    prefill(model, own, ids)
    prefill_shared(model, [other], ids)
    assert_same(own, other)


def test_the_model_runs_once():
    model, ids = kvtool.attach(peaky_model("llama")), random_ids(TOKENS)
    runs = []
    model.model.layers[0].register_forward_hook(lambda *_: runs.append(1))
    caches = [any_cache(model, policy, BUDGET) for policy in ("h2o", "snapkv", "quest")]
    prefill_shared(model, caches, ids)
    assert len(runs) == 1


def test_a_cache_that_does_not_know_the_words_reads_alone():
    model = kvtool.attach(peaky_model("llama"))
    assert not can_share(model, kvtool.build_cache(model, "kvzip", BUDGET), TOKENS)


@pytest.mark.parametrize("tokens", [TOKENS, LONG_PROMPT])
def test_attention_is_summed_once_for_policies_of_the_same_numbers(tokens, monkeypatch):
    """Among others that sum something else, and one that splits by the variance of all layers."""
    model, ids = kvtool.attach(peaky_model("llama")), random_ids(tokens)
    names = ["h2o", "d2o", "roco", "h2o+caote", "d2o(merge=none)", "scissorhands"]
    alone = [any_cache(model, name, BUDGET) for name in names]
    for cache in alone:
        prefill(model, cache, ids)
    summed = []
    once = OwnBlock._attend

    def count(attention, layer, *rest):
        if layer.policy.needs_all_rows:
            summed.append((layer.policy.columns, layer.index))
        return once(attention, layer, *rest)

    monkeypatch.setattr(OwnBlock, "_attend", count)
    together = [any_cache(model, name, BUDGET) for name in names]
    prefill_shared(model, together, ids)
    layers = model.config.num_hidden_layers
    assert len(summed) == 4 * layers  # h2o, d2o beside its variance, roco, scissorhands
    for own, cache in zip(alone, together, strict=True):
        assert_same(own, cache)
        for one, other in zip(own.slot_layers, cache.slot_layers, strict=True):
            for name, numbers in one.slots.state.items():
                torch.testing.assert_close(other.slots.state[name], numbers, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma3", "gptj", "deepseek_v3", "lfm2", "llama4", "gemma3n"])
def test_families_of_other_layers_read_alone(family):
    model = kvtool.attach(family_model(family))
    assert not can_share(model, any_cache(model, "h2o", BUDGET), TOKENS)


@pytest.mark.parametrize(
    ("policy", "mode"),
    [("sirllm", "full"), ("streaming(positions=cache)", "full"), ("h2o", "block:32")],
)
def test_policies_that_read_otherwise_read_alone(policy, mode):
    model = kvtool.attach(peaky_model("llama"))
    assert not can_share(model, any_cache(model, policy, BUDGET, prefill=mode), TOKENS)


def test_a_cache_that_holds_something_reads_alone():
    model = kvtool.attach(peaky_model("llama"))
    cache = any_cache(model, "h2o", BUDGET)
    prefill(model, cache, random_ids(TOKENS))
    assert not can_share(model, cache, TOKENS)


def test_blocks_that_hold_the_prompt_share():
    model = kvtool.attach(peaky_model("llama"))
    assert can_share(model, any_cache(model, "h2o", BUDGET, prefill="block:90"), TOKENS)


def test_a_budget_too_small_is_refused():
    model = kvtool.attach(peaky_model("llama"))
    cache = any_cache(model, "streaming(sinks=4)", "5%")
    with pytest.raises(UsageError, match="budget"):
        prefill_shared(model, [cache], random_ids(40))
