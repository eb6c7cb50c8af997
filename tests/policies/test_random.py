from dataclasses import replace

import pytest
import torch

import kvtool
from kvtool import parse_policy
from kvtool.errors import UsageError
from kvtool.generation import decode_step, prefill
from kvtool.policies.numbers import KVHeads
from tests.models_for_tests import peaky_model, random_ids
from tests.policies.trial import Trial


def drawn(text, tokens, budget, kv_heads=2, layer=0):
    weights = torch.zeros(kv_heads, 1, tokens, tokens)
    return Trial(text, budget, kv_heads, layer=layer).feed(weights)


def test_the_same_seed_draws_the_same():
    assert drawn("random", 23, 11).kept() == drawn("random", 23, 11).kept()
    assert drawn("random", 23, 11).kept() != drawn("random(seed=1)", 23, 11).kept()


def test_the_order_of_slots_does_not_matter():
    straight = drawn("random", 5, 3)
    shuffled = Trial("random", 3, 2, layout=[4, 2, 0, 1, 3]).feed(torch.zeros(2, 1, 5, 5))
    assert torch.equal(straight.scores(), shuffled.scores())


def test_heads_of_a_layer_share_the_draw_and_layers_do_not():
    first, second = (drawn("random", 23, 11, layer=layer).kept() for layer in (0, 1))
    assert first[0] == first[1]
    assert first != second


def test_heads_may_draw_for_themselves():
    kept = drawn("random(per_head=true)", 23, 11).kept()
    assert kept[0] != kept[1]


def test_a_new_token_means_a_new_draw():
    before, after = drawn("random", 23, 11), drawn("random", 24, 11)
    assert not torch.equal(before.scores()[0], after.scores()[0, :23])


def test_draws_are_uniform_over_slots():
    # 300 draws of 5 out of 13: each slot goes 300 * 5 / 13 = 115.4 times; with a standard
    # deviation of sqrt(300 * 5/13 * 8/13) = 8.4, five of them are 42
    gone = torch.zeros(13)
    for seed in range(300):
        kept = drawn(f"random(seed={seed})", 13, 8, kv_heads=1).kept()[0]
        gone += 1
        gone[kept] -= 1
    assert gone.sum() == 300 * 5
    assert (gone - 300 * 5 / 13).abs().max() < 42


def test_draws_of_neighbours_are_independent():
    # which of two neighbouring slots scores higher is a fair coin, and so is whether a slot scores
    # higher at the next step: 4000 throws, standard deviation 31.6, five of them 158
    at = torch.stack(
        [drawn("random", 41, 7, 1).scores()[0]]
        + [drawn(f"random(seed={seed})", 41, 7, 1).scores()[0] for seed in range(1, 100)]
    )
    heads = (at[:, 1:] > at[:, :-1]).sum()
    assert abs(int(heads) - 2000) < 158
    correlation = torch.corrcoef(at.T)[0, 1:]
    assert correlation.abs().max() < 0.5


def test_sinks_and_recent_tokens_may_be_kept():
    trial = drawn("random(sinks=2,recent=3)", 23, 7)
    assert trial.protected() == [{0, 1, 20, 21, 22}] * 2
    for kept in trial.kept():
        assert len(kept) == 7
        assert {0, 1, 20, 21, 22} <= set(kept)
    assert drawn("random", 23, 7).protected() == [set()] * 2


def test_refuses_protection_that_fills_the_budget():
    with pytest.raises(UsageError, match=r"budget 5 is not above sinks 2 \+ recent 3 = 5"):
        parse_policy("random(sinks=2,recent=3)").check_budget(5)
    with pytest.raises(UsageError, match="random: seed must be 0 or more, got -1"):
        parse_policy("random(seed=-1)")
    with pytest.raises(UsageError, match="`random` has none"):
        parse_policy("random+caote")


# ---- the prompt stays


def kept(cache, layer=0, row=0):
    return [head[head >= 0].tolist() for head in cache.kept_positions(layer)[row]]


@pytest.mark.parametrize("mode", ["full", "block:7"])
def test_the_prompt_stays_and_what_is_generated_is_drawn_from(mode):
    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, "random(prompt=true)", 24, prefill=mode)
    prefill(model, cache, random_ids(18))
    for token in random_ids(40, seed=1)[0]:
        decode_step(model, cache, token[None])
        for head in kept(cache):
            assert head[:18] == list(range(18))
            assert len(head) == min(24, cache.tokens_seen()[0])
    assert kept(cache)[0][18:] != list(range(52, 58))  # no window
    assert kept(cache)[0] == kept(cache)[1]


def test_each_row_keeps_its_own_prompt():
    model = kvtool.attach(peaky_model("llama"))
    ids, mask = random_ids(18, batch=2), torch.ones(2, 18, dtype=torch.long)
    mask[1, :5] = 0
    both = kvtool.build_cache(model, "random(prompt=true)", 24)
    alone = kvtool.build_cache(model, "random(prompt=true)", 24)
    prefill(model, both, ids, mask)
    prefill(model, alone, ids[1:, 5:])
    for tokens in random_ids(20, seed=1, batch=2).T:
        decode_step(model, both, tokens)
        decode_step(model, alone, tokens[1:])
    assert kept(both, 1, 1) == kept(alone, 1)
    assert kept(both, 1, 1)[0][:13] == list(range(13))


def test_a_second_turn_stays_as_well():
    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, "random(prompt=true)", 24)
    prefill(model, cache, random_ids(9))
    for token in random_ids(20, seed=1)[0]:
        decode_step(model, cache, token[None])
    prefill(model, cache, random_ids(8, seed=2))
    held = kept(cache)[0]
    assert set(held) >= {*range(9), *range(29, 37)}
    assert len(held) == 24
    with pytest.raises(UsageError, match="its 24 tokens and one that is generated exceed"):
        prefill(model, cache, random_ids(7, seed=2))


def test_a_saved_cache_remembers_which_tokens_were_the_prompt(tmp_path):
    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, "random(prompt=true)", 24)
    prefill(model, cache, random_ids(18))
    for token in random_ids(10, seed=1)[0]:
        decode_step(model, cache, token[None])
    kvtool.save_cache(cache, tmp_path / "a.safetensors", model=model)
    loaded = kvtool.load_cache(tmp_path / "a.safetensors", model)
    for token in random_ids(10, seed=2)[0]:
        for each in (cache, loaded):
            decode_step(model, each, token[None])
    assert kept(loaded) == kept(cache)


def test_heads_in_another_process_draw_what_they_draw_in_one():
    class SecondHalf(KVHeads):
        processes = 2

        def first(self, held):
            return held

    whole = drawn("random(per_head=true)", 23, 11, kv_heads=4)
    part = replace(
        whole.view,
        positions=whole.view.positions[:, 2:],
        values=(whole.view.values[0][:, 2:],),
        heads=SecondHalf(),
    )
    score = whole.policy.score
    ours, theirs = (score.importance({}, view, None) for view in (part, whole.view))
    assert torch.equal(ours, theirs[:, 2:])
    assert not torch.equal(ours, theirs[:, :2])
