"""Going back: after a question a cache is as if it had never been asked, whatever the policy."""

import pytest
import torch

import kvtool
from kvtool.generation import decode_step, prefill
from kvtool.policies.grammar import parse_policy
from tests.models_for_tests import (
    RECURRENT,
    any_cache,
    family_model,
    peaky_model,
    random_ids,
)

pytestmark = pytest.mark.few(2)  # every policy goes through tests/contract

BUDGET = 24
POLICIES = ["h2o+caote", "snapkv(window=4)+calidrop(store=file)", "tova(positions=cache)+cam"]
POLICIES += ["h2o+ada", "d2o", "sirllm", "rocketkv(window=4)", "kvzip", "rkv", "full", "h2o+duo"]
"""All that caches keep beside slots; the battery takes every policy back (tests/contract)."""


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama", num_hidden_layers=3))


def new_cache(model, policy, prefill="full", budget=BUDGET):
    kept = budget if parse_policy(policy).takes_budget else None
    return any_cache(model, policy, kept, prefill=prefill)


def tokens(batch, *ids):
    return [torch.full((batch,), token) for token in ids]


def ask(model, cache, batch=1, seed=9, turn=13):
    """A further turn and five tokens; every logit on the way."""
    logits = [prefill(model, cache, random_ids(turn, seed=seed, batch=batch))]
    logits += [decode_step(model, cache, token) for token in tokens(batch, 5, 9, 9, 4, 17)]
    return torch.stack(logits)


def steps(model, cache, batch=1):
    """Six tokens without a further turn."""
    return torch.stack([decode_step(model, cache, t) for t in tokens(batch, *range(20, 26))])


def same_state(cache, other):
    """Everything that a report and a file would show of two caches."""
    assert cache.tokens_seen() == other.tokens_seen()
    assert cache.report() == other.report()
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        if hasattr(mine, "sorted_slots"):
            mine, theirs = mine.sorted_slots(), theirs.sorted_slots()
            assert torch.equal(mine.positions, theirs.positions)
            for name, tensor in mine.stored.items():
                assert torch.equal(tensor, theirs.stored[name])


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_left_while_decoding_and_in_a_padded_batch(model, policy):
    ids, mask = random_ids(50, batch=3), torch.ones(3, 50, dtype=torch.long)
    mask[1, :21], mask[2, :40] = 0, 0
    asked, never = (new_cache(model, policy) for _ in range(2))
    for cache in (asked, never):
        prefill(model, cache, ids, mask)
        steps(model, cache, batch=3)
    with asked.rollback():
        ask(model, asked, batch=3)
        asked.reorder_cache(torch.tensor([2, 0, 0]))
        asked.batch_select_indices(torch.tensor([1]))
    same_state(asked, never)
    assert torch.equal(steps(model, asked, batch=3), steps(model, never, batch=3))
    assert torch.equal(ask(model, asked, batch=3), ask(model, never, batch=3))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "policy"),
    [
        (RECURRENT[0], "h2o"),
        *((family, "snapkv(window=4)") for family in RECURRENT[1:]),
        ("mistral-window", "h2o"),
        ("deepseek_v3", "h2o"),
        ("gptj", "full"),
        ("gpt_oss", "h2o"),
    ],
)
def test_every_kind_of_layer_goes_back(family, policy):
    model = kvtool.attach(family_model(family))
    asked, never = (new_cache(model, policy) for _ in range(2))
    for cache in (asked, never):
        prefill(model, cache, random_ids(40))
    with asked.rollback():
        ask(model, asked)
    same_state(asked, never)
    assert torch.equal(steps(model, asked), steps(model, never))
    assert torch.equal(ask(model, asked), ask(model, never))


@pytest.mark.parametrize("policy", ["h2o+caote", "adakv(window=4)"])
def test_room_that_is_held_for_tokens_to_come_is_as_it_was(model, policy):
    asked, never = (new_cache(model, policy) for _ in range(2))
    for cache in (asked, never):
        prefill(model, cache, random_ids(50))
        decode_step(model, cache, torch.tensor([3]))
        assert cache.fix_shapes(9)
    with asked.rollback():
        steps(model, asked)
    with asked.rollback():
        assert asked.fix_shapes(9)
        ask(model, asked)
    assert torch.equal(steps(model, asked), steps(model, never))
    assert torch.equal(ask(model, asked), ask(model, never))


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["h2o+caote", "h2o+d2o-alloc"])
def test_questions_inside_questions(model, policy):
    asked, never = (new_cache(model, policy) for _ in range(2))
    for cache in (asked, never):
        prefill(model, cache, random_ids(50))
    with asked.rollback():
        steps(model, asked)
        with asked.rollback():
            inner = ask(model, asked)
        assert torch.equal(ask(model, asked), inner)
    same_state(asked, never)
    assert torch.equal(ask(model, asked), ask(model, never))


def fail(model, cache):
    with cache.rollback():
        ask(model, cache, turn=7)
        decode_step(model, cache, torch.tensor([10_000]))  # no such token


def test_a_failure_inside_goes_back_as_well(model):
    cache, never = new_cache(model, "h2o"), new_cache(model, "h2o")
    for each in (cache, never):
        prefill(model, each, random_ids(50))
    with pytest.raises(IndexError):
        fail(model, cache)
    assert torch.equal(steps(model, cache), steps(model, never))


def test_inference_mode_leaves_tensors_that_can_be_written_outside_it(model):
    cache, never = new_cache(model, "h2o+caote"), new_cache(model, "h2o+caote")
    for each in (cache, never):
        prefill(model, each, random_ids(50))
    with torch.inference_mode(), cache.rollback():
        steps(model, cache)
    assert torch.equal(steps(model, cache), steps(model, never))


def test_steps_in_inference_mode_are_followed_by_others(model):
    cache, never = new_cache(model, "h2o+caote"), new_cache(model, "h2o+caote")
    with torch.inference_mode():
        prefill(model, cache, random_ids(50))
        steps(model, cache)
    prefill(model, never, random_ids(50))
    steps(model, never)
    assert torch.equal(steps(model, cache), steps(model, never))


def places(cache):
    """Addresses of all keys and values."""
    stores = [store.slots for layer in cache.layers for store in layer.stores]
    return [each.data_ptr() for slots in stores for each in (slots.keys, slots.values)]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("policy", "turn", "copied"),
    [
        ("full", True, False),
        ("snapkv(window=4)", False, False),
        ("adakv(window=4)", False, False),
        ("h2o", False, True),
        ("h2o+ada", False, True),
    ],
)
def test_keys_are_copied_only_where_a_stored_one_is_written_over(model, policy, turn, copied):
    cache = new_cache(model, policy)
    prefill(model, cache, random_ids(50))
    decode_step(model, cache, torch.tensor([3]))  # leaves slots free behind those in use
    before = places(cache)
    with cache.rollback():
        (prefill if turn else decode_step)(model, cache, torch.tensor([[4]] if turn else [4]))
        inside = places(cache)
        assert all(a != b for a, b in zip(inside, before, strict=True)) is copied
        assert (inside == before) is not copied
    assert places(cache) == before
    assert not any(each.slots.shared for layer in cache.layers for each in layer.stores)
