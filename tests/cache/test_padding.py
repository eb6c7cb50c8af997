"""Row i of a left-padded batch is row i alone: for every policy, budget and prefill."""

from __future__ import annotations

import pytest
import torch

import kvtool
from kvtool.generation import decode_step, prefill
from tests.models_for_tests import instructed, peaky_model, random_ids

pytestmark = pytest.mark.few(2)  # every policy goes through tests/contract

LENGTHS = (60, 37, 11)


def batch(lengths=LENGTHS) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    rows = [random_ids(length, seed=length) for length in lengths]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, -row.shape[1] :], mask[i, -row.shape[1] :] = row[0], 1
    return ids, mask, rows


def same_row(both, alone, row: int) -> None:
    for layer in range(2):
        expected = alone.kept_positions(layer)[0]
        ours = both.kept_positions(layer)[row]
        assert torch.equal(ours[:, : expected.shape[1]], expected)
        assert (ours[:, expected.shape[1] :] == -1).all()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("policy", "budget", "mode"),
    [
        ("h2o+caote", 0.5, "block:16"),
        ("full", None, "block:16"),
        ("random(per_head=true,sinks=1)", 0.5, "full"),
        ("tova+caote", 0.5, "full"),
        ("roco(sinks=1,protect_recent=2)+caote+ada(safeguard=force)", 0.5, "full"),
        ("snapkv(window=3,kernel=3)", 0.5, "block:16"),
        ("sirllm(sinks=2)", 0.5, "block:16"),
        ("pyramidinfer(min_context=2,sinks=1)", 0.5, "full"),
        ("adakv(window=3,kernel=3)+cam", 0.5, "block:16"),
        ("snapkv(window=3,kernel=3)+duo", 0.5, "full"),
        ("d2o+uniform", 0.5, "block:16"),
        ("h2o+calidrop(theta1=0.4,theta2=0.6,calibration_size=9)", 0.5, "full"),
        ("h2o(positions=cache)+ada(share=0.1)", 0.5, "full"),
        ("quest", 0.5, "block:16"),
        ("sparq", 0.5, "full"),
        ("loki", 0.5, "block:16"),
        ("exact-topk", 0.5, "full"),
        ("h2o+caote", 512, "full"),
    ],
)
def test_rows_are_what_they_are_alone(policy, budget, mode):
    """Shares of texts of other lengths, and budgets that fit; tests/contract has the others."""
    model = kvtool.attach(peaky_model("qwen3"))
    ids, mask, rows = batch()
    rows_are_rows_alone(model, policy, budget, mode, ids, mask, rows, random_ids(7, 9, batch=3))


def rows_are_rows_alone(model, policy, budget, mode, ids, mask, rows, new):
    """Compare a padded batch, after its prompt and some tokens, with caches of single rows."""
    both = kvtool.build_cache(model, policy, budget, prefill=mode)
    together = [prefill(model, both, ids, mask)]
    together += [decode_step(model, both, tokens) for tokens in new.T]
    for i, row in enumerate(rows):
        if row is None:
            continue
        one = kvtool.build_cache(model, policy, budget, prefill=mode)
        alone = [prefill(model, one, row)]
        alone += [decode_step(model, one, token[None]) for token in new[i]]
        ours = torch.stack([logits[i] for logits in together])
        torch.testing.assert_close(ours, torch.cat(alone), atol=3e-4, rtol=3e-4)
        same_row(both, one, i)


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["quest", "streaming", "rocketkv(window=3)"])
def test_a_share_of_padding_alone_is_no_reason_to_refuse_the_others(policy):
    model = kvtool.attach(peaky_model("llama"))
    row, new = random_ids(60, seed=60), random_ids(4, seed=9).repeat(2, 1)
    ids, mask = torch.zeros(2, 60, dtype=torch.long), torch.zeros(2, 60, dtype=torch.long)
    ids[1], mask[1] = row[0], 1
    rows_are_rows_alone(model, policy, 0.5, "full", ids, mask, [None, row], new)


def test_a_batch_of_padding_alone_is_refused():
    model = kvtool.attach(peaky_model("llama"))
    ids = torch.zeros(2, 9, dtype=torch.long)
    for policy in ("h2o", "kvzip", "quest"):
        with pytest.raises(kvtool.UsageError, match="the prompt is empty"):
            prefill(model, instructed(kvtool.build_cache(model, policy, 20)), ids, ids)


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["h2o+caote", "snapkv(window=3)", "h2o+duo"])
def test_a_plain_generate_runs_the_same_blocks(policy):
    model = kvtool.attach(peaky_model("llama"))
    ids, mask, rows = batch()
    settings = {"max_new_tokens": 10, "do_sample": False}
    driven = kvtool.build_cache(model, policy, 20, prefill="block:16")
    prefill(model, driven, ids, mask)
    whole = kvtool.build_cache(model, policy, 20, prefill="block:16")
    model.generate(ids, attention_mask=mask, past_key_values=whole, max_new_tokens=1)
    for layer in range(2):
        assert torch.equal(driven.kept_positions(layer), whole.kept_positions(layer))
    cache = kvtool.build_cache(model, policy, 20, prefill="block:16")
    together = model.generate(ids, attention_mask=mask, past_key_values=cache, **settings)
    for i, row in enumerate(rows):
        cache = kvtool.build_cache(model, policy, 20, prefill="block:16")
        alone = model.generate(row, past_key_values=cache, **settings)
        assert together[i, -10:].tolist() == alone[0, -10:].tolist()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("policy", "lengths", "block", "budget"),
    [
        # the last block is one token in one row, padding in the other
        ("h2o+caote", (33, 32), 16, 20),
        ("streaming(sinks=1,positions=cache)", (33, 32), 16, 20),
        ("recency", (13, 9), 1, 5),  # every block is one token
        ("snapkv(window=1)", (40, 39), 2, 0.5),  # budgets differ long before a row is padded
        ("sirllm(sinks=1)", (58, 30), 5, 0.35),
        ("rocketkv(window=4)", (60, 37), 16, 0.5),
        ("hsa", (60, 37), 16, 0.8),
    ],
)
def test_padding_that_only_the_last_blocks_show(policy, lengths, block, budget):
    model = kvtool.attach(peaky_model("llama"))
    ids, mask, rows = batch(lengths)
    new = random_ids(8, seed=9, batch=2)
    rows_are_rows_alone(model, policy, budget, f"block:{block}", ids, mask, rows, new)


def test_padding_on_the_right_is_the_same_prompt():
    model = kvtool.attach(peaky_model("llama"))
    ids, mask, _ = batch()
    left, right = (kvtool.build_cache(model, "tova", 20, prefill="block:16") for _ in range(2))
    expected = prefill(model, left, ids, mask)
    order = (1 - mask).argsort(dim=1, stable=True)
    ours = prefill(model, right, ids.gather(1, order), mask.gather(1, order))
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_a_share_too_small_for_the_window_is_refused_before_the_first_forward():
    model = kvtool.attach(peaky_model("llama"))
    ids, mask, _ = batch()
    cache = kvtool.build_cache(model, "snapkv(window=8)", "50%")
    with pytest.raises(kvtool.UsageError, match="50% of 11 tokens: budget 5 is not above window 8"):
        prefill(model, cache, ids, mask)
    assert cache.get_seq_length() == 0
