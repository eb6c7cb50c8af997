"""Rules that only the code decides, as the page of the policies states them."""

import pytest
import torch
from safetensors.torch import load_file

import kvtool
from kvtool.cache.features.sparse_index import SparseIndex
from kvtool.generation import compress, decode_step, prefill
from tests.coded import decoded_slots
from tests.models_for_tests import instructed, peaky_model, random_ids


def model_of(**changes):
    return kvtool.attach(peaky_model("llama", **changes))


def decode(model, cache, tokens):
    with torch.no_grad():
        for token in tokens:
            decode_step(model, cache, torch.tensor([token]))


def test_d2o_measures_f_anew_in_a_turn_and_never_while_decoding():
    model = model_of(num_hidden_layers=3)
    cache = kvtool.build_cache(model, "d2o", 24)
    prefill(model, cache, random_ids(60))
    first = cache.budgets.spreads[0].variance
    decode(model, cache, range(5, 15))
    assert cache.budgets.spreads[0].variance == first
    prefill(model, cache, random_ids(30, seed=1))
    assert cache.budgets.spreads[0].variance != first
    assert cache.budgets.spreads[0].queries == 30  # those of the turn alone


def test_expected_counts_evicted_prompt_tokens_and_no_answers():
    model = model_of()
    small, large = (kvtool.build_cache(model, "expected", budget) for budget in (12, 100))
    for cache in (small, large):
        prefill(model, cache, random_ids(60))
    counted = [cache.first_layer.parts["moments"].state["count"] for cache in (small, large)]
    assert torch.equal(*counted)
    assert counted[0].unique().tolist() == [56]  # without the 4 sinks
    decode(model, small, range(5, 9))
    assert torch.equal(small.first_layer.parts["moments"].state["count"], counted[0])


def test_a_prompt_of_kvzip_is_read_exactly_and_repeated_over_codes():
    model, ids = model_of(head_dim=32), random_ids(60)

    def read(policy, budget=20):
        cache = instructed(kvtool.build_cache(model, policy, budget))
        with torch.no_grad():
            return compress(model, cache, ids).next_logits, cache.kept_positions(1)

    exact, _ = read("full", None)
    logits, kept = read("kvzip+int4")
    torch.testing.assert_close(logits, exact, atol=1e-4, rtol=1e-4)
    with decoded_slots("int4"):  # slots of numbers that codes stand for
        assert torch.equal(read("kvzip")[1], kept)
    assert not torch.equal(read("kvzip")[1], kept)


def test_files_of_cache_positions_hold_keys_turned_to_the_place_they_were_read_at(tmp_path):
    """One token over and over: layer 0 has one key for it, turned by its place alone."""
    model, keys = model_of(), {}
    for policy in ("streaming(positions=cache)", "streaming"):
        cache = kvtool.build_cache(model, policy, 20)
        prefill(model, cache, torch.full((1, 40), 7))
        decode(model, cache, [7] * 16)
        kvtool.save_cache(cache, tmp_path / "a.safetensors", model=model)
        keys[policy] = load_file(tmp_path / "a.safetensors")["layer.0.keys"][0, :, -10:]
    placed, by_text = keys.values()
    torch.testing.assert_close(placed, placed[:, :1].expand_as(placed), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(by_text[:, 0], by_text[:, 1], atol=1e-2)


@pytest.mark.parametrize("policy", ["pyramidkv(window=4)", "h2o"])
def test_a_later_turn_is_cut_to_the_same_budget_with_all_before_it(policy):
    model = model_of()
    cache = kvtool.build_cache(model, policy, 20)
    for seed in range(2):
        prefill(model, cache, random_ids(60, seed=seed))
        assert sum(cache.report().kept_per_layer) == 20 * len(cache.layers)
        decode(model, cache, range(5, 10))


def test_a_share_counts_all_tokens_read_so_far():
    model = model_of()
    cache = kvtool.build_cache(model, "h2o", "25%")
    for seed, kept in enumerate((15, 30)):
        prefill(model, cache, random_ids(60, seed=seed))
        assert cache.report().kept_per_layer == [kept] * len(cache.layers)
    decode(model, cache, range(5, 13))  # answers do not raise it until the next turn
    assert cache.report().kept_per_layer == [30] * len(cache.layers)
    prefill(model, cache, random_ids(60, seed=2))
    assert cache.report().kept_per_layer == [(128 + 60) // 4] * len(cache.layers)


@pytest.mark.parametrize("policy", ["h2o", "d2o(merge=none)+uniform"])
def test_attention_goes_on_being_summed_over_turns(policy):
    model = model_of()
    cache = kvtool.build_cache(model, policy, 30)
    prefill(model, cache, random_ids(60))
    slots = cache.first_layer.sorted_slots()
    (name,) = slots.state
    first = slots.state[name][0, 0, 0].item()  # of the first token, which attracts all queries
    prefill(model, cache, random_ids(30, seed=1))
    after = cache.first_layer.sorted_slots()
    assert after.positions[0, 0, 0] == 0
    assert after.state[name][0, 0, 0] > first


def test_quest_sizes_its_pages_anew_in_every_turn_and_not_while_decoding():
    model = model_of()
    cache = kvtool.build_cache(model, "quest", 16)
    for seed, read in enumerate((100, 203)):
        prefill(model, cache, random_ids(100, seed=seed))
        for tokens in ((5,), (6, 7)):
            decode(model, cache, tokens)
            page = SparseIndex.of(cache.layers[0]).entries[0].readers[0].page
            assert page == -(-2 * read // 16)
