"""A question that is kept whole behind a compressed context: budgets grow by it, once."""

from contextlib import nullcontext

import pytest
import torch

import kvtool
from kvtool.generation import decode_step, prefill
from tests.models_for_tests import peaky_model, random_ids
from tests.tiers import first

BUDGET, CONTEXT, QUESTION = 20, 50, 9
POLICIES = [
    "h2o+caote",
    "snapkv(window=6)+chunk(length=5)",
    "adakv(window=6)+every(steps=6)",
    "h2o+calidrop(calibration_size=9)",
    "sirllm",
    "rkv(window=4,buffer=8)",
    "rocketkv(window=6)",
    "pyramidkv(window=6)",
    "pyramidinfer(min_context=2)",
    "d2o",
    "h2o+ada",
    "h2o(positions=cache)+every(steps=6)",
    "lagkv(lag=5)",
    "streaming",
]


def kept(cache, layer=0, row=0):
    return [head[head >= 0].tolist() for head in cache.kept_positions(layer)[row]]


def read(model, policy, ids, mask=None, *, mode="full", budget=BUDGET, keep=True):
    """Read a context, then a question behind it; what was kept of the context, and the cache."""
    cache = kvtool.build_cache(model, policy, budget, prefill=mode)
    context, question = ids[:, :CONTEXT], ids[:, CONTEXT:]
    prefill(model, cache, context, None if mask is None else mask[:, :CONTEXT])
    rows = range(len(ids))
    before = [[kept(cache, layer, row) for row in rows] for layer in range(2)]
    own = None if mask is None else mask[:, CONTEXT:]
    with cache.budgets.raising() if keep else nullcontext():
        prefill(model, cache, question, own)
    return before, cache


@pytest.mark.parametrize("policy", first(6, POLICIES))
def test_nothing_is_cut_for_it_and_a_policy_then_holds_the_budget_and_the_question(policy):
    model = kvtool.attach(peaky_model("llama"))
    question = list(range(CONTEXT, CONTEXT + QUESTION))
    mode = "full" if POLICIES.index(policy) % 2 else "block:4"
    before, cache = read(model, policy, random_ids(CONTEXT + QUESTION), mode=mode)
    for layer in range(2):
        assert kept(cache, layer) == [head + question for head in before[layer][0]]
    if "rocketkv" in policy:
        return  # which stores what is decoded
    parsed = kvtool.parse_policy(policy)
    after = [sum(map(len, kept(cache, layer))) for layer in range(2)]
    for i, token in enumerate(random_ids(14, seed=1)[0], 1):
        decode_step(model, cache, token[None])
        for layer in range(2):
            held = sum(map(len, kept(cache, layer)))
            if parsed.when == "prompt":
                assert held == after[layer] + 2 * i
            else:
                assert held <= after[layer] + 2 * (parsed.spare - 1)


def test_a_prompt_that_fits_leaves_the_rest_of_its_budget():
    model = kvtool.attach(peaky_model("llama"))
    cache = kvtool.build_cache(model, "h2o", BUDGET)
    prefill(model, cache, random_ids(12))
    with cache.budgets.raising():
        prefill(model, cache, random_ids(QUESTION, seed=1))
    for token in random_ids(20, seed=2)[0]:
        decode_step(model, cache, token[None])
    assert len(kept(cache)[0]) == BUDGET + QUESTION


def test_a_share_is_one_of_the_context_alone():
    model = kvtool.attach(peaky_model("llama"))
    before, cache = read(model, "h2o", random_ids(CONTEXT + QUESTION), budget="40%")
    assert len(before[0][0][0]) == 20
    for token in random_ids(12, seed=2)[0]:
        decode_step(model, cache, token[None])
    assert len(kept(cache)[0]) == 20 + QUESTION


@pytest.mark.parametrize("policy", first(3, [p for p in POLICIES if "rocketkv" not in p]))
def test_rows_of_a_padded_batch_keep_their_own(policy):
    model = kvtool.attach(peaky_model("llama"))
    ids = random_ids(CONTEXT + QUESTION, batch=3)
    mask = torch.ones_like(ids)
    mask[1, :17] = 0
    mask[2, :40] = 0  # fits
    _, cache = read(model, policy, ids, mask)
    alone = []
    for row, start in enumerate((0, 17, 40)):
        own = kvtool.build_cache(model, policy, BUDGET)
        prefill(model, own, ids[row : row + 1, start:CONTEXT])
        with own.budgets.raising():
            prefill(model, own, ids[row : row + 1, CONTEXT:])
        alone.append(own)
    for tokens in random_ids(7, seed=4, batch=3).T:
        logits = decode_step(model, cache, tokens)
        for row, own in enumerate(alone):
            single = decode_step(model, own, tokens[row : row + 1])
            torch.testing.assert_close(logits[row], single[0], atol=1e-4, rtol=1e-4)
            assert [kept(cache, layer, row) for layer in range(2)] == [
                kept(own, layer) for layer in range(2)
            ]


def test_what_comes_later_is_cut_again():
    model = kvtool.attach(peaky_model("llama"))
    _, cache = read(model, "snapkv(window=6)", random_ids(CONTEXT + QUESTION))
    prefill(model, cache, random_ids(30, seed=5))
    assert len(kept(cache)[0]) == BUDGET


@pytest.mark.parametrize("policy", ["quest", "exact-topk"])
def test_readers_store_and_read_as_always(policy):
    model = kvtool.attach(peaky_model("llama"))
    ids = random_ids(CONTEXT + QUESTION)
    caches = [read(model, policy, ids, keep=keep)[1] for keep in (True, False)]
    for token in random_ids(4, seed=6)[0]:
        logits = [decode_step(model, cache, token[None]) for cache in caches]
        torch.testing.assert_close(*logits)
