"""KV heads of unequal counts: what each keeps, what is stored, what else befalls a cache."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvtool
from kvtool.cache.slots.ragged import _bins
from kvtool.errors import KvtoolError, UsageError
from kvtool.generation import decode_step, prefill
from tests.cache.test_oracle import Run, follow
from tests.models_for_tests import (
    HOOKED,
    anchored_model,
    family_model,
    peaky_model,
    prompt,
    random_ids,
)
from tests.reference import oracle
from tests.reference.ada import Competing
from tests.reference.policies import build
from tests.reference.ranks import Ranked

pytestmark = pytest.mark.few(2)  # every policy goes through tests/contract

TOKEN_BYTES = 16 * 2 * 4  # of one head: dim, key and value, float32
CASES = [
    ("snapkv", None, {"window": 8}),
    ("snapkv", "caote", {"window": 5, "kernel": 3}),
    ("h2o", None, {}),
    ("h2o", "caote", {"recent": 3}),
    ("scissorhands", None, {}),
    ("tova", None, {"head_reduce": "kv_head"}),
    ("roco", "fastcaote", {"scope": 4, "protect_recent": 2, "sinks": 1}),
]
POLICIES = ["adakv(window=6)", "h2o+ada", "tova+ada(share=0)", "roco(sinks=2)+caote+ada"]


def spell(base, modifier, options, ada):
    inside = ",".join(f"{key}={value}" for key, value in options.items())
    text = base + (f"({inside})" if inside else "")
    return text + (f"+{modifier}" if modifier else "") + f"+ada({ada})"


@pytest.fixture
def model(family):
    yield kvtool.detach(anchored_model(family))
    kvtool.detach(anchored_model(family))


def test_slots_beyond_what_a_head_stores_are_empty():
    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, "adakv(window=6)", 20)
    prefill(model, cache, random_ids(61))
    for layer in cache.slot_layers:
        positions = layer.stored_positions()
        filled = (positions >= 0).sum(-1, keepdim=True)
        assert filled.min() < filled.max() == positions.shape[2]
        beyond = torch.arange(positions.shape[2]) >= filled
        assert torch.equal(positions == -1, beyond)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "share", "base", "modifier", "options"),
    [
        (family, share, *case)
        for family, share, case in zip(
            itertools.cycle(["llama", "qwen3"]),
            itertools.cycle([0.2, 0.0, 0.0]),
            CASES,
            strict=False,
        )
    ],
)
def test_kept_positions_and_logits_equal_the_oracle(model, share, base, modifier, options):
    trace = follow(
        model,
        lambda: Competing(lambda tokens: build(base, tokens, modifier, **options), 20, share),
        spell(base, modifier, options, f"share={share}"),
        20,
        "full",
        prompt(61),
        new=20,
    )
    counts = {len(head) for heads in trace.kept[0].values() for head in heads}
    assert len(counts) > 1, "the heads of this model keep alike, so nothing was tried"


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama"])
@pytest.mark.parametrize(
    ("base", "modifier", "options", "share"),
    [
        ("h2o", "caote", {"recent": 3}, 0.9),
        ("snapkv", "caote", {"window": 5, "kernel": 3}, 0.2),
        ("tova", None, {"head_reduce": "kv_head"}, 0.2),
    ],
)
def test_turns_of_any_length_equal_the_oracle(model, base, modifier, options, share):
    """Heads compete anew after every turn; one that offers less than its share leaves the rest."""
    slow = oracle.Oracle(
        model, lambda: Competing(lambda tokens: build(base, tokens, modifier, **options), 20, share)
    )
    policy, run = spell(base, modifier, options, f"share={share}"), None
    texts = [prompt(length, seed=seed) for seed, length in enumerate([50, 1, 1, 7, 30])]
    for text in texts:
        slow.in_prompt = True
        expected = slow.feed(text)
        if run is None:
            run = Run(kvtool.detach(model), policy, 20, "full", text)
        else:
            run.logits = prefill(kvtool.attach(model), run.cache, torch.tensor([text]))[0]
        for token in [None, 5]:
            if token is not None:
                kvtool.detach(model)
                slow.in_prompt = False
                expected = slow.feed([token])
                kvtool.attach(model)
                run.feed(token)
            assert run.kept() == slow.kept
            torch.testing.assert_close(run.logits, expected, atol=1e-4, rtol=1e-4)
        kvtool.detach(model)


@pytest.mark.parametrize("family", ["llama"])
def test_heads_of_unequal_counts_number_their_own_tokens(model):
    follow(
        model,
        lambda: Competing(lambda tokens: build("h2o", tokens), 20, 0.0),
        "h2o(positions=cache)+ada(share=0)",
        20,
        "full",
        prompt(41),
        new=4,
        kind=Ranked,
    )


def counts_of(cache, layers=3):
    return [(cache.kept_positions(layer) >= 0).sum(-1).tolist() for layer in range(layers)]


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["h2o+ada", "adakv(window=6)"])
def test_bytes_are_those_of_the_filled_slots_and_little_more_is_allocated(policy):
    model = kvtool.attach(peaky_model("llama", num_hidden_layers=3, num_key_value_heads=8))
    cache = kvtool.build_cache(model, policy, 64)
    prefill(model, cache, random_ids(160, batch=2))
    report = cache.report()
    assert report.kv_bytes == 64 * 3 * 8 * 2 * TOKEN_BYTES
    assert report.allocated_bytes <= report.kv_bytes * 1.15
    widest = max(max(max(row) for row in layer) for layer in counts_of(cache))
    assert widest * 3 * 8 * 2 * TOKEN_BYTES > report.allocated_bytes, "masked, not freed"
    for token in range(2, 10):
        decode_step(model, cache, torch.tensor([token, token]))
    more = 8 * 3 * 8 * 2 * TOKEN_BYTES if policy.startswith("adakv") else 0
    assert cache.report().kv_bytes == 64 * 3 * 8 * 2 * TOKEN_BYTES + more


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_a_turn_that_fits_beside_what_is_kept_drops_nothing(policy):
    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, policy, 20)
    prefill(model, cache, random_ids(40))
    before = [cache.kept_positions(layer) for layer in range(2)]
    for layer in cache.layers:  # slots for one turn more
        layer.set_budget(layer.budget.split(layer.budget.by_head + 30))
    cache.budgets.budget = type(cache.budget)(tokens=60)
    prefill(model, cache, random_ids(9, seed=2))
    for layer in range(2):
        after = cache.kept_positions(layer)
        for head in range(2):
            kept = [p for p in before[layer][0, head].tolist() if p >= 0]
            new = [p for p in after[0, head].tolist() if p >= 0]
            assert new == kept + list(range(40, 49))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "cached_heads"),
    [("gemma2", None), ("gemma3", None), ("gpt_oss", None), ("deepseek_v3", 1)],
)
def test_soft_caps_sliding_layers_sinks_and_latent_heads(family, cached_heads):
    follow(
        kvtool.detach(family_model(family)),
        lambda: Competing(lambda tokens: build("h2o", tokens, "caote"), 20),
        "h2o+caote+ada",
        20,
        "full",
        prompt(61),
        new=6,
        cached_heads=cached_heads,
    )


@pytest.mark.skipif("gptj" not in HOOKED, reason="from transformers 5.24 on it can be exchanged")
def test_families_with_attention_of_their_own_refuse_it_in_one_line():
    model = kvtool.attach(family_model("gptj"))
    cache = kvtool.build_cache(model, "adakv(window=6)", 16)
    prefill(model, cache, random_ids(50))
    with pytest.raises(KvtoolError, match="different counts"):
        decode_step(model, cache, torch.tensor([5]))


def test_what_has_no_scores_cannot_compete():
    for policy in ("streaming+ada", "recency+ada", "random+ada"):
        with pytest.raises(UsageError, match="compete by their scores"):
            kvtool.parse_policy(policy)
    with pytest.raises(UsageError, match="keeps everything"):
        kvtool.parse_policy("full+ada")
    with pytest.raises(UsageError, match="share must be between 0 and 1"):
        kvtool.parse_policy("adakv(share=2)")
    assert str(kvtool.parse_policy("snapkv+ada+pyramid")) == "snapkv+pyramid+ada"


def test_lanes_of_like_size_share_a_store():
    assert _bins(range(5), [100, 99, 50, 98, 49]) == [[0, 1, 3], [2, 4]]
    assert _bins(range(3), [8, 1, 4]) == [[0, 1, 2]]
    assert _bins(range(2), [1000, 10]) == [[0], [1]]
    assert _bins([0, 2], [8, 1, 4]) == [[0, 2]]


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=12), st.booleans())
def test_lanes_that_share_a_store_take_a_seventh_more_at_most_and_nothing_where_it_is_exact(
    needs, exact
):
    for lanes in _bins(range(len(needs)), needs, exact):
        width = max(needs[lane] for lane in lanes)
        for lane in lanes:
            more = 0 if exact else max(needs[lane] / 7, 8)
            assert width <= needs[lane] + more
