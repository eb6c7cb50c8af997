"""Whole prompts whose columns come from the fused kernel's log-sum-exp, against weights in full."""

from __future__ import annotations

import pytest
import torch

import kvtool
from kvtool.cache.steps import attend_block
from kvtool.cache.steps.attend_block import _token_columns
from kvtool.generation import decode_step, prefill
from tests.models_for_tests import family_model, peaky_model, random_ids

LENGTH, BUDGET = 61, 24
POLICIES = [
    "h2o",
    "roco",
    "scissorhands",
    "d2o",  # whose layers wait for one another, with the sums of every query head
    "h2o+cam(deterministic=true)",
    "streaming+d2o-alloc(norm=minmax)",
    "h2o+ada",
    "h2o(positions=cache)",
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """More than one tile of a short prompt, which is summed as a long one is."""
    monkeypatch.setattr("kvtool.cache.steps.attend_block.LONG_PROMPT", 1)
    monkeypatch.setattr("kvtool.maths.statistics._TILE_ROWS", 32)
    monkeypatch.setattr("kvtool.maths.statistics._TILE_KEYS", 16)


def run(model, policy, ids, mask=None, budget=BUDGET, mode="full", steps=2):
    """A cache after a prompt and some tokens, and the logits."""
    cache = kvtool.build_cache(model, policy, budget, prefill=mode)
    logits = [prefill(model, cache, ids, attention_mask=mask)]
    for token in range(5, 5 + steps):
        logits.append(decode_step(model, cache, torch.full((len(ids),), token)))
    return cache, torch.stack(logits)


def both(monkeypatch, model, policy, ids, mask=None, **options):
    """The same by sums from the log-sum-exp, how often they were taken, and by weights in full."""
    taken, own = [], attend_block.sum_block
    monkeypatch.setattr(attend_block, "sum_block", lambda *args: taken.append(1) or own(*args))
    ours = run(model, policy, ids, mask, **options)
    monkeypatch.setattr(attend_block, "can_sum", lambda *_: False)
    return ours, len(taken), run(model, policy, ids, mask, **options)


def compare(one, other, tolerance=1e-4):
    (cache, logits), (twin, expected) = one, other
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=tolerance)
    for layer, theirs in zip(cache.slot_layers, twin.slot_layers, strict=True):
        if layer.ragged is not None:
            continue  # its heads hold different counts: the logits and positions decide
        state, wanted = layer.slots.state, theirs.slots.state
        assert state.keys() == wanted.keys()
        assert torch.equal(layer.slots.positions, theirs.slots.positions)
        for name, number in state.items():
            torch.testing.assert_close(number, wanted[name], atol=tolerance, rtol=tolerance)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("policy", "budget"), [*((each, BUDGET) for each in POLICIES), ("h2o", 200)]
)
def test_a_whole_prompt_counts_the_same(monkeypatch, policy, budget):
    model = kvtool.attach(peaky_model("llama"))
    ours, taken, plain = both(monkeypatch, model, policy, random_ids(LENGTH), budget=budget)
    assert taken == 2  # layers
    compare(ours, plain)


@pytest.mark.parametrize("short", [0, 1])
def test_rows_of_few_tokens_are_weighed_in_full(monkeypatch, short):
    """Tokens of theirs that tie must tie: the sums of large logits are rounded otherwise."""
    monkeypatch.setattr("kvtool.cache.steps.attend_block.LONG_PROMPT", LENGTH - 5 + 10 * short)
    model, ids = kvtool.attach(peaky_model("llama")), random_ids(LENGTH, batch=2)
    mask = torch.ones_like(ids)
    mask[0, : 5 + short] = 0
    ours, taken, plain = both(monkeypatch, model, "h2o", ids, mask, steps=0)
    assert taken == (0 if short else 2)
    compare(ours, plain)


def test_a_row_with_a_hole_is_weighed_in_full(monkeypatch):
    """Its tokens are no stretch of the columns."""
    model, ids = kvtool.attach(peaky_model("llama")), random_ids(LENGTH, batch=2)
    mask = torch.ones_like(ids)
    mask[0, 20:25] = 0
    ours, taken, plain = both(monkeypatch, model, "h2o", ids, mask, steps=0)
    assert not taken
    compare(ours, plain)


@pytest.mark.parametrize(("policy", "mode"), [("roco", "block:16"), ("d2o", "full")])
def test_padded_rows_count_the_same_and_as_alone(monkeypatch, policy, mode):
    model, ids = kvtool.attach(peaky_model("llama")), random_ids(LENGTH, batch=3)
    mask = torch.ones_like(ids)
    mask[0, :9], mask[2, :40] = 0, 0
    ours, taken, plain = both(monkeypatch, model, policy, ids, mask, mode=mode)
    assert taken == 2
    compare(ours, plain)
    for row, padding in enumerate((9, 0, 40)):
        _, alone = run(model, policy, ids[row : row + 1, padding:], mode=mode)
        torch.testing.assert_close(ours[1][:, row : row + 1], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["mistral", "gemma2", "gpt_oss", "eager", "gradient"])
def test_what_the_kernel_cannot_tell_is_weighed_in_full(monkeypatch, case):
    """Windows, soft caps, sinks, a wish for eager attention, gradients."""
    model = peaky_model("mistral", sliding_window=11) if case == "mistral" else peaky_model("llama")
    if case in ("gemma2", "gpt_oss"):
        model = family_model(case)
    elif case == "eager":
        model = peaky_model("llama", "eager")
    sliding = case in ("gemma2", "gpt_oss")
    ids, taken = random_ids(30), []
    monkeypatch.setattr(attend_block, "sum_block", lambda *args: taken.append(1))
    model = kvtool.attach(model)
    if case == "gradient":
        cache = kvtool.build_cache(model, "h2o", 12)
        logits = model(ids, past_key_values=cache).logits
        logits.sum().backward()
        assert model.get_input_embeddings().weight.grad.isfinite().all()
    else:
        run(model, "h2o", ids, budget=40 if sliding else 20)
    assert not taken


def test_a_later_block_is_weighed_in_full(monkeypatch):
    """Only the first sees nothing but itself."""
    model, taken, own = kvtool.attach(peaky_model("llama")), [], attend_block.sum_block
    monkeypatch.setattr(attend_block, "sum_block", lambda *args: taken.append(1) or own(*args))
    run(model, "h2o", random_ids(LENGTH), mode="block:16")
    assert len(taken) == 2


def test_each_row_is_cut_to_its_tokens():
    new = torch.tensor([[-1, -1, 0, 1], [0, 1, 2, 3], [-1, -1, -1, -1], [-1, 5, 6, 7]])
    assert _token_columns(new) == [slice(2, 4), slice(0, 4), slice(0, 0), slice(1, 4)]
