"""Cuts every few tokens: against the oracle, in padded batches, by bytes; refusals."""

import pytest
import torch

import kvtool
from kvtool import parse_policy
from kvtool.errors import UsageError
from kvtool.generation import decode_step, prefill
from tests.cache.test_oracle import follow
from tests.models_for_tests import anchored_model, peaky_model, prompt, random_ids
from tests.reference.policies import build
from tests.tiers import first

BUDGET = 20


CASES = [
    ("full", "h2o", "every caote"),
    ("block:20", "streaming", "every"),
    ("full", "scissorhands", "every"),
    # the exhaustive tier from here
    ("full", "roco", "every"),
    ("full", "keydiff", "every"),
    ("block:20", "tova", "every caote"),
]


@pytest.mark.parametrize("case", first(3, CASES), ids=" ".join)
def test_kept_positions_and_logits_equal_the_oracle(case):
    mode, base, modifier = case
    spelled = f"{base}+caote+every(steps=5)" if "caote" in modifier else f"{base}+every(steps=5)"
    follow(
        anchored_model("llama"),
        lambda: build(base, BUDGET, modifier),
        spelled,
        BUDGET,
        mode,
        prompt(61),
        new=12,
    )


@pytest.mark.parametrize("length", [1, 19, 20, 24, 25])
def test_prompts_around_the_budget_are_cut_when_it_and_the_steps_are_reached(length):
    model, counts = peaky_model("llama"), []
    cache = kvtool.build_cache(model, "h2o+every(steps=5)", BUDGET)
    prefill(model, cache, random_ids(length))
    steps = 30 if length == 1 else 11
    for token in random_ids(steps, seed=3)[0]:
        decode_step(model, cache, token[None])
        counts.append(cache.kept_positions(0).shape[-1])
    start, expected = min(length, BUDGET), []
    for _ in range(steps):
        start = BUDGET if start + 1 == BUDGET + 5 else start + 1
        expected.append(start)
    assert counts == expected
    assert cache.slot_layers[0].slots.capacity == BUDGET + 5


def test_one_step_is_as_without_it():
    model = peaky_model("llama")
    plain, paced = (
        kvtool.build_cache(model, policy, BUDGET) for policy in ("h2o", "h2o+every(steps=1)")
    )
    for cache in (plain, paced):
        prefill(model, cache, random_ids(50))
    for token in random_ids(12, seed=4)[0]:
        logits = [decode_step(model, cache, token[None]) for cache in (plain, paced)]
        torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
        assert torch.equal(plain.kept_positions(1), paced.kept_positions(1))


ROWS = [("h2o+ada", BUDGET), ("d2o", "40%"), ("tova+caote", "40%"), ("keydiff", BUDGET)]


@pytest.mark.parametrize("case", first(2, ROWS), ids=str)
def test_rows_that_are_cut_at_other_times_are_the_rows_alone(case):
    policy, budget = case
    rows_are_the_rows_alone(f"{policy}+every(steps=6)", budget)


def rows_are_the_rows_alone(spelled, budget):
    """Of a padded batch whose rows are cut at other times."""
    model, lengths = peaky_model("llama"), (61, 57, 33, 18)
    ids = random_ids(61, batch=4)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, 61 - length :] = 1
    batch = kvtool.build_cache(model, spelled, budget)
    alone = [kvtool.build_cache(model, spelled, budget) for _ in lengths]
    prefill(model, batch, ids, mask)
    for row, (cache, length) in enumerate(zip(alone, lengths, strict=True)):
        prefill(model, cache, ids[row : row + 1, 61 - length :])
    for tokens in random_ids(13, seed=5, batch=4).T:
        logits = decode_step(model, batch, tokens)
        for row, cache in enumerate(alone):
            own = decode_step(model, cache, tokens[row : row + 1])
            torch.testing.assert_close(logits[row], own[0], atol=1e-4, rtol=1e-4)
            for layer in range(2):
                both = batch.kept_positions(layer)[row], cache.kept_positions(layer)[0]
                kept = [[head[head >= 0].tolist() for head in each] for each in both]
                assert kept[0] == kept[1]


def test_a_second_turn_is_cut_as_a_prompt():
    model = peaky_model("llama")
    cache = kvtool.build_cache(model, "h2o+every(steps=6)", BUDGET)
    for turn in range(3):
        prefill(model, cache, random_ids(30, seed=turn))
        assert cache.kept_positions(0).shape[-1] == BUDGET
        for token in random_ids(3 + turn, seed=9)[0]:
            decode_step(model, cache, token[None])
        assert cache.kept_positions(0).shape[-1] == BUDGET + 3 + turn


def test_bytes_count_the_steps():
    model = peaky_model("llama")
    held = {}
    for policy in ("h2o", "h2o+every(steps=12)"):
        cache = kvtool.build_cache(model, policy, "24KiB")
        prefill(model, cache, random_ids(90))
        sizes = []
        for token in random_ids(40, seed=6)[0]:
            decode_step(model, cache, token[None])
            report = cache.report()
            sizes.append(report.allocated_bytes + report.state_bytes)
        assert max(sizes) <= 24 * 1024
        held[policy] = cache.slot_layers[0].budget.max_budget
    assert held["h2o+every(steps=12)"] == held["h2o"] + 1 - 12


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("expected+every", "`expected` scores prompts only"),
        ("kvzip+every", "`kvzip` scores prompts only"),
        ("pyramidinfer+every", "`pyramidinfer` scores prompts only"),
        ("full+every", "`full` keeps everything"),
        ("sirllm+every", "`sirllm` cuts all layers at once"),
        ("quest+every", "`every` has nothing to do there"),
        ("rocketkv+every", "`every` has no part in it"),
        ("h2o+every(steps=0)", "steps must be 1 or more, got 0"),
        ("h2o+every+every", "`every` is given twice"),
    ],
)
def test_what_makes_no_sense_is_refused(policy, told):
    with pytest.raises(UsageError, match=told):
        parse_policy(policy)
