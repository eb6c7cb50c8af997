"""Merging against an oracle that merges token by token, and what must hold of it in a cache."""

import itertools
import re

import pytest
import torch

import kvtool
from kvtool.cache.features.merge_memory import MergeMemory
from kvtool.errors import KvtoolError, UsageError
from kvtool.generation import decode_step, prefill
from tests.models_for_tests import anchored_model, family_model, peaky_model, prompt, random_ids
from tests.reference import merging, policies

pytestmark = pytest.mark.few(2)  # every policy goes through tests/contract

LENGTH, BUDGET, NEW = 61, 20, 8
MODES = {"full": None, "block:20": 20, "block:12": 12}
CASES = {
    "d2o+uniform": ("d2o", {}, merging.D2O),
    "h2o+d2o-merge": ("h2o", {}, merging.D2O),
    "h2o(recent=3)+d2o-merge(beta=0.4,merge=v)": (
        "h2o",
        {"recent": 3},
        lambda layer: merging.D2O(beta=0.4, merge="v"),
    ),
    "streaming+d2o-merge": ("streaming", {}, merging.D2O),
    "snapkv(window=8)+d2o-merge": ("snapkv", {"window": 8}, merging.D2O),
    "streaming+cam": ("streaming", {}, merging.CaM),
    "streaming+cam(m=3,seed=5)": (
        "streaming",
        {},
        lambda layer: merging.CaM(layer, m=3, seed=5),
    ),
    "h2o+cam(m=4,deterministic=true)": (
        "h2o",
        {},
        lambda layer: merging.CaM(layer, m=4, deterministic=True),
    ),
    "tova+cam": ("tova", {}, merging.CaM),
    "snapkv(window=8)+cam": ("snapkv", {"window": 8}, merging.CaM),
}


def make(case):
    base, settings, merge = CASES[case]
    if merge is merging.D2O:
        return base, settings, lambda layer: merging.D2O()
    return base, settings, merge


@pytest.fixture
def model(family):
    yield kvtool.detach(anchored_model(family))
    kvtool.detach(anchored_model(family))


def compare(model, case, mode, budgets=None):
    """The prompt, then tokens, in the oracle and in the cache."""
    base, settings, merge = make(case)
    budgets = iter(budgets or [BUDGET] * 3)
    slow = merging.MergingOracle(
        model, lambda: policies.build(base, next(budgets), **settings), merge
    )
    ids, tokens = prompt(LENGTH), prompt(NEW, seed=1)
    size = MODES[mode] or LENGTH
    for start in range(0, LENGTH, size):
        expected = slow.feed(ids[start : start + size])
    slow.in_prompt = False
    kvtool.attach(model)
    cache = kvtool.build_cache(model, case, BUDGET, prefill=mode)
    ours = prefill(model, cache, torch.tensor([ids]))
    for step in range(NEW + 1):
        if step:
            kvtool.detach(model)
            expected = slow.feed([tokens[step - 1]])
            kvtool.attach(model)
            ours = decode_step(model, cache, torch.tensor([tokens[step - 1]]))
        for layer in range(3):
            assert cache.kept_positions(layer)[0].tolist() == slow.kept[layer]
        torch.testing.assert_close(ours[0], expected, atol=1e-4, rtol=1e-4)
    return slow


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "mode", "case"),
    list(zip(itertools.cycle(["llama", "qwen3"]), itertools.cycle(MODES), CASES, strict=False)),
)
def test_kept_positions_and_logits_equal_the_oracle(model, case, mode):
    slow = compare(model, case, mode)
    assert sum(len(changed) for changed in slow.changed.values()) > 20  # it merges, and often


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama"])
def test_d2o_merges_under_the_budgets_of_its_allocator(model):
    plain = kvtool.build_cache(kvtool.attach(model), "h2o+d2o-alloc(norm=minmax)", BUDGET)
    prefill(model, plain, torch.tensor([prompt(LENGTH)]))
    budgets = plain.report().kept_per_layer
    assert len(set(budgets)) > 1
    kvtool.detach(model)
    CASES["d2o+d2o-alloc(norm=minmax)"] = ("d2o", {}, merging.D2O)
    compare(model, "d2o+d2o-alloc(norm=minmax)", "full", budgets)


def fed(model, policy, budget, ids, mask=None, mode="full", tokens=()):
    cache = kvtool.build_cache(model, policy, budget, prefill=mode)
    logits = [prefill(model, cache, ids, mask)]
    logits += [decode_step(model, cache, token) for token in tokens]
    return cache, torch.stack(logits)


def test_each_component_of_d2o_can_be_taken_away():
    model = kvtool.attach(peaky_model("llama", num_hidden_layers=4))
    ids, tokens = random_ids(60), random_ids(3, seed=1).T
    split = "d2o-alloc(norm=minmax)"
    variants = [f"d2o+{split}", "d2o+uniform", f"d2o(merge=v)+{split}"]
    variants += [f"d2o(merge=none)+{split}", "d2o(merge=none)+uniform"]
    outs = {policy: fed(model, policy, 20, ids, tokens=tokens) for policy in variants}
    for policy, (cache, _) in outs.items():
        kept = cache.report().kept_per_layer
        assert sum(kept) == 80
        assert (len(set(kept)) == 1) == ("uniform" in policy)
    logits = [out for _, out in outs.values()]
    for i, one in enumerate(logits):
        assert all(not torch.allclose(one, other, atol=1e-3) for other in logits[:i])
    assert outs["d2o(merge=none)+uniform"][0].layers[0].parts == {}
    same, _ = fed(model, f"d2o(merge=none)+d2o-merge+{split}", 20, ids, tokens=tokens)
    assert torch.equal(same.layers[3].keys, outs[f"d2o+{split}"][0].layers[3].keys)
    assert kvtool.parse_policy("d2o").allocator == kvtool.parse_policy("h2o+d2o-alloc").allocator


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("policy", "mode"), [("h2o+caote+d2o-merge", "block:16"), ("streaming+cam", "full")]
)
def test_layers_that_decide_together_do_what_each_does_alone(policy, mode, monkeypatch):
    model = kvtool.attach(peaky_model("llama"))
    ids, tokens = random_ids(50), random_ids(6, seed=1).T
    grouped, together = fed(model, policy, 20, ids, mode=mode, tokens=tokens)
    assert grouped.groups.formed
    monkeypatch.setattr("kvtool.cache.steps.grouped.LayerGroups.form", lambda *_, **__: None)
    single, alone = fed(model, policy, 20, ids, mode=mode, tokens=tokens)
    assert not single.groups.formed
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_keys_that_are_all_equal_stay_as_they_are():
    model = peaky_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.zero_()
            layer.self_attn.k_proj.bias = torch.nn.Parameter(torch.ones(32))
    model.model.rotary_emb.inv_freq.zero_()  # no position turns a key
    cache, _ = fed(kvtool.attach(model), "d2o", 20, random_ids(60), tokens=random_ids(9, seed=1).T)
    for layer in cache.layers:
        torch.testing.assert_close(layer.keys, torch.ones_like(layer.keys))
        torch.testing.assert_close(MergeMemory.of(layer).state["tau"], torch.ones(1, 2))


def test_latents_and_sliding_layers():
    model = kvtool.attach(family_model("deepseek_v3"))
    for policy in ("d2o", "streaming+cam"):
        with pytest.raises(KvtoolError, match="this model stores latents"):
            fed(model, policy, 20, random_ids(60))
    model = kvtool.attach(family_model("gemma3"))
    cache, _ = fed(model, "d2o", 20, random_ids(60))
    assert [bool(layer.parts) for layer in cache.layers] == [False, True, False, True]
    assert [layer.policy.on_evict is None for layer in cache.layers] == [True, False, True, False]


def test_what_makes_no_sense_is_refused():
    for text, told in (
        ("full+cam", "`cam` makes something of evicted tokens, and `full` evicts none"),
        ("full+d2o-merge", "and `full` evicts none"),
        ("h2o+cam+d2o-merge", "modifiers `cam` and `d2o-merge` exclude each other"),
        ("h2o+cam+cam", "modifier `cam` is given twice"),
        ("d2o+d2o-merge", "`d2o` merges what it evicts already, which excludes `d2o-merge`"),
        ("d2o+cam", "which excludes `cam`"),
        ("h2o+d2o", "`d2o` is a base policy"),
        ("d2o+ada", "`d2o-merge` cannot follow heads of unequal counts while they decode"),
        ("h2o+cam+ada", "`cam` cannot follow heads of unequal counts while they decode"),
        ("d2o(beta=0)", "beta must be above 0"),
        ("h2o+d2o-merge(beta=1.5)", "d2o-merge: beta must be above 0 and at most 1, got 1.5"),
        ("h2o+d2o-merge(merge=k)", "merge must be one of kv, v, got `k`"),
        ("h2o+cam(m=0)", "cam: m must be 1 or more, got 0"),
        ("h2o+cam(seed=-1)", "cam: seed must be 0 or more, got -1"),
    ):
        with pytest.raises(UsageError, match=re.escape(told)):
            kvtool.parse_policy(text)
