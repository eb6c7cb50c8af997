"""Scoring given tokens through a cache: equal to one plain forward where nothing is evicted."""

from contextlib import nullcontext

import pytest
import torch

import kvtool
from kvtool.generation import prefill, token_logprobs
from kvtool.models.load import load
from kvtool.models.reference.tasks import needle_prompt
from tests.models_for_tests import peaky_model, random_ids


@pytest.fixture(scope="module")
def reference():
    loaded = load()
    text, answer = needle_prompt(tokens=150, seed=3)
    ids = loaded.tokenizer(text + answer, return_tensors="pt").input_ids
    return with_plain_scores(loaded.model, ids)


@pytest.fixture(scope="module")
def small():
    return with_plain_scores(peaky_model("llama"), random_ids(70, seed=5))


def with_plain_scores(model, ids):
    """A model, tokens, and what one plain forward says about each token but the first."""
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].float()
    targets = ids[:, 1:]
    logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    kvtool.attach(model)
    return model, ids, logprobs, logits.argmax(-1) == targets


@pytest.mark.parametrize(
    ("case", "chunk", "policy", "budget"),
    [
        *(("reference", 16, "h2o", 500), ("small", 1, "full", None)),
        *(("small", 16, "h2o", 500), ("small", 128, "h2o", 500)),
    ],
)
def test_what_keeps_everything_equals_one_forward(request, case, chunk, policy, budget):
    model, ids, logprobs, greedy = request.getfixturevalue(case)
    cache = kvtool.build_cache(model, policy, budget)
    scored, most_likely = token_logprobs(model, cache, ids, chunk=chunk)
    # the reference model finds filler unlikely: 1e-6 of 20 nats is what float32 leaves
    torch.testing.assert_close(scored, logprobs, atol=1e-5, rtol=3e-6)
    assert torch.equal(most_likely, greedy)
    assert scored.dtype == torch.float32
    assert 0 < greedy.sum() < greedy.numel() or case == "small"


@pytest.mark.parametrize(("given", "chunk"), [(1, 7), (33, 1), (33, 7), (69, 7)])
def test_tokens_after_a_context_are_scored_from_the_first_on(small, chunk, given):
    model, ids, logprobs, greedy = small
    cache = kvtool.build_cache(model, "full")
    first = prefill(model, cache, ids[:, :given])
    scored, most_likely = token_logprobs(
        model, cache, ids[:, given:], chunk=chunk, first_logits=first
    )
    torch.testing.assert_close(scored, logprobs[:, given - 1 :], atol=1e-5, rtol=0)
    assert torch.equal(most_likely, greedy[:, given - 1 :])
    assert cache.tokens_seen() == [69]  # the last token was scored and not fed


@pytest.mark.parametrize("chunk", [1, 16])
def test_a_small_budget_is_kept_and_felt(small, chunk):
    model, ids, logprobs, _ = small
    cache = kvtool.build_cache(model, "h2o", 12)
    scored, _ = token_logprobs(model, cache, ids, chunk=chunk)
    report = cache.report()
    assert report.kept_per_layer == [12, 12]
    assert report.tokens_seen == 69
    # the first token is scored before anything is evicted; later ones from what is left
    torch.testing.assert_close(scored[:, : 12 if chunk == 1 else 16], logprobs[:, : max(12, chunk)])
    assert (scored - logprobs)[:, 20:].abs().max() > 0.01


def test_a_share_is_one_of_all_the_tokens(small):
    model, ids, _, _ = small
    cache = kvtool.build_cache(model, "h2o", "50%")
    token_logprobs(model, cache, ids, chunk=16)
    assert cache.report().kept_per_layer == [35, 35]


def test_a_context_is_a_prompt_and_what_follows_is_decoded(small):
    # snapkv cuts prompts only: 12 of the 40 stay, the 20 tokens fed after them are appended
    model, ids, _, _ = small
    cache = kvtool.build_cache(model, "snapkv(window=4)", 12)
    first = prefill(model, cache, ids[:, :40])
    token_logprobs(model, cache, ids[:, 40:61], chunk=1, first_logits=first)
    assert cache.report().kept_per_layer == [32, 32]


def test_a_single_token_without_logits_has_no_score(small):
    model, ids, _, _ = small
    scored, greedy = token_logprobs(model, kvtool.build_cache(model, "full"), ids[:, :1], chunk=1)
    assert scored.shape == greedy.shape == (1, 0)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "policy",
    ["full+int4", "kvzip+k8v4", "adakv+int8", "snapkv+int8", "expected+fp8", "full+int(keys=4)"],
)
def test_tokens_of_a_block_can_see_each_other_as_they_are_stored(policy):
    """As decoded tokens do, of which each reads the codes of those before it."""
    loaded = load()
    ids = torch.randint(10, 400, (1, 200), generator=torch.Generator().manual_seed(1))
    budget = None if policy.startswith("full") else 64

    def scores(chunk, rounds):
        cache = kvtool.build_cache(loaded.model, policy, budget)
        first = prefill(loaded.model, cache, ids, tokenizer=loaded.tokenizer)
        with cache.budgets.raising(), cache.running.rounding() if rounds else nullcontext():
            return token_logprobs(loaded.model, cache, ids[:, :6], chunk=chunk, first_logits=first)[
                0
            ]

    decoded = scores(1, False)
    torch.testing.assert_close(scores(6, True), decoded, atol=1e-3, rtol=0)
    assert (scores(6, False) - decoded).abs().max() > 0.01
