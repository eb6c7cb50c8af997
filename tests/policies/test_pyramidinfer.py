"""PyramidInfer in a cache: nested keep-sets, voted by the recent queries of each layer."""

from itertools import pairwise

import pytest
import torch

import kvtool
from kvtool.cache.steps import attend_block
from kvtool.errors import UsageError
from kvtool.generation import decode_step, prefill
from kvtool.policies.grammar import parse_policy
from kvtool.policies.scores.pyramidinfer import PyramidInfer
from tests.models_for_tests import anchored_model, peaky_model, prompt, random_ids
from tests.reference import oracle
from tests.reference.pyramidinfer import PyramidInfer as Twin


@pytest.fixture
def model():
    return kvtool.attach(peaky_model("llama", num_hidden_layers=4))


def kept_sets(cache, row=0):
    found = []
    for layer in range(len(cache.layers)):
        heads = [set(head.tolist()) - {-1} for head in cache.kept_positions(layer)[row]]
        assert all(head == heads[0] for head in heads)
        found.append(heads[0])
    return found


@pytest.mark.parametrize(
    ("options", "budget", "length", "family", "chunk"),
    [
        # the first layer keeps the whole prompt
        ({"sinks": 4, "recent_ratio": 0.2}, 58, 61, "qwen3", 3),
        ({"sinks": 1, "recent_ratio": 0.5}, 20, 61, "llama", 3),
        ({"sinks": 0, "recent_ratio": 0.01}, 24, 45, "llama", 128),  # one vote
    ],
)
def test_kept_tokens_and_logits_equal_the_slow_twin(
    options, budget, length, family, chunk, monkeypatch
):
    monkeypatch.setattr(attend_block, "_EXPLICIT_ROWS", chunk)
    ids = prompt(length)
    model = anchored_model(family)
    inside = ",".join(f"{name}={value}" for name, value in options.items())
    policy = f"pyramidinfer(min_context=2,{inside})"
    cache = kvtool.build_cache(kvtool.attach(model), policy, budget)
    logits = [prefill(model, cache, torch.tensor([ids]))[0]]
    kept = [cache.kept_positions(layer)[0].tolist() for layer in range(3)]
    budgets = cache.report().kept_per_layer
    tokens = prompt(7, seed=1)
    logits += [decode_step(model, cache, torch.tensor([token]))[0] for token in tokens]
    kvtool.detach(model)
    assert sum(budgets) == budget * 3
    assert budgets[2] < budgets[0]
    nest = []
    slow = oracle.Oracle(model, lambda: Twin(budgets, nest, **options))
    expected = [slow.feed(ids)]
    assert kept == [slow.kept[layer] for layer in range(3)]
    slow.in_prompt = False
    expected += [slow.feed([token]) for token in tokens]
    torch.testing.assert_close(torch.stack(logits), torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_the_votes_of_the_recent_queries_rise_to_the_newest():
    policy = PyramidInfer()
    assert [policy.voters(n) for n in (1, 9, 10, 1000)] == [1, 1, 2, 200]
    expected = torch.linspace(1, 1.2, 200)[None] / 200
    torch.testing.assert_close(policy.vote_weights(200, 1000), expected)
    assert policy.vote_weights(1, 3).tolist() == [[1.0]]
    rows = policy.vote_weights(200, torch.tensor([1000, 20, 3]).view(3, 1, 1))
    torch.testing.assert_close(rows[:1], expected)
    assert rows[1].tolist() == pytest.approx(
        [0.0] * 196 + [w / 4 for w in (1, 16 / 15, 17 / 15, 1.2)]
    )
    assert rows[2].tolist() == [0.0] * 199 + [1.0]


@pytest.mark.parametrize("budget", [100, 240, "40%"])
def test_a_layer_keeps_part_of_what_the_layer_above_keeps(model, budget):
    n = 300
    cache = kvtool.build_cache(model, "pyramidinfer", budget)
    prefill(model, cache, random_ids(n))
    kept, mean = kept_sets(cache), 120 if budget == "40%" else budget
    assert sum(map(len, kept)) == mean * 4
    for above, below in pairwise(kept):
        assert below <= above
    recent = int(0.2 * len(kept[0])) + 1
    for layer in kept:
        assert {0, 1, 2, 3, *range(n - recent, n)} <= layer
    for token in random_ids(5, seed=1)[0]:
        decode_step(model, cache, token[None])
    assert [len(layer) for layer in kept_sets(cache)] == [len(layer) + 5 for layer in kept]


def test_blocks_of_a_prompt_are_read_at_once(model):
    whole, blocks = (
        kvtool.build_cache(model, "pyramidinfer", 60, prefill=mode) for mode in ("full", "block:16")
    )
    prefill(model, whole, random_ids(200))
    prefill(model, blocks, random_ids(200))
    for layer in range(4):
        assert torch.equal(whole.kept_positions(layer), blocks.kept_positions(layer))


def test_a_further_turn_is_cut_to_the_budget_again(model, tmp_path):
    policy = "pyramidinfer(min_context=2)"
    cache = kvtool.build_cache(model, policy, 40)
    prefill(model, cache, random_ids(100))
    first = cache.report().kept_per_layer
    kvtool.save_cache(cache, tmp_path / "a.safetensors", model=model)
    loaded = kvtool.load_cache(tmp_path / "a.safetensors", model)
    turn = random_ids(50, seed=1)
    torch.testing.assert_close(prefill(model, loaded, turn), prefill(model, cache, turn))
    assert sum(first) == sum(cache.report().kept_per_layer) == 160
    for layer in range(4):
        assert torch.equal(loaded.kept_positions(layer), cache.kept_positions(layer))


def test_transformers_own_generate_cuts_the_same(model):
    ids = random_ids(100)
    driven, plain = (kvtool.build_cache(model, "pyramidinfer(min_context=2)", 40) for _ in range(2))
    prefill(model, driven, ids)
    model.generate(ids, past_key_values=plain, max_new_tokens=1)
    assert kept_sets(driven) == kept_sets(plain)
    chunked = kvtool.build_cache(model, "pyramidinfer(min_context=2)", 40)
    model.generate(ids, past_key_values=chunked, max_new_tokens=2, prefill_chunk_size=16)
    assert sum(chunked.report().kept_per_layer) == 4 * 41


def test_its_spelling_and_what_is_refused(model):
    text = "PyramidInfer(recent_ratio=0.2, min_context=32)"
    assert str(parse_policy(text)) == "pyramidinfer(min_context=32)"
    for text, told in [
        ("pyramidinfer(recent_ratio=1)", "recent_ratio must be above 0 and below 1, got 1.0"),
        ("pyramidinfer(min_context=-1)", "min_context must be 0 or more, got -1"),
        ("pyramidinfer(sinks=-1)", "sinks must be 0 or more, got -1"),
        ("pyramidinfer+caote", "and `pyramidinfer` has none"),
        ("pyramidinfer+uniform", "a schedule of its own, which excludes `uniform`"),
        ("pyramidinfer+ada", "a schedule of its own, which excludes `ada`"),
    ]:
        with pytest.raises(UsageError, match=told):
            parse_policy(text)
    with pytest.raises(UsageError, match="budget 6 is not above sinks 4 \\+ recent 2 = 6"):
        kvtool.build_cache(model, "pyramidinfer", 6)
