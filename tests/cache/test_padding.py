"""Row i of a left-padded batch is row i alone: for every policy, budget and prefill."""

from __future__ import annotations

import pytest
import torch

import kvtool
from kvtool.generation import decode_step, prefill
from tests.models_for_tests import instructed, peaky_model, random_ids

pytestmark = pytest.mark.few(2)  # every policy goes through tests/contract

LENGTHS = (60, 37, 11)
POLICIES = [
    "full",
    "random",
    "random(per_head=true,sinks=1)",
    "recency",
    "streaming(sinks=2)",
    "scissorhands",
    "scissorhands+caote",
    "h2o",
    "h2o+caote",
    "h2o+fastcaote",
    "tova",
    "tova+caote",
    "roco(sinks=1,protect_recent=2)",
    "roco(sinks=1,protect_recent=2)+caote",
    "snapkv(window=3,kernel=3)",
    "sirllm(sinks=2)",
    "pyramidinfer(min_context=2,sinks=1)",
    "snapkv(window=3,kernel=3)+caote",
    "adakv(window=3,kernel=3)",
    "h2o+ada(share=0.1)",
    "duoattention",
    "h2o+duo",
    "snapkv(window=3,kernel=3)+duo",
    "roco(sinks=1,protect_recent=2)+caote+ada(safeguard=force)",
    "d2o+uniform",
    "streaming+d2o-merge",
    "h2o+caote+cam",
    "snapkv(window=3,kernel=3)+cam(m=5)",
    "adakv(window=3,kernel=3)+cam",
    "snapkv(window=3,kernel=3)+calidrop(theta1=0.4,theta2=0.6)",
    "h2o+calidrop(theta1=0.4,theta2=0.6,calibration_size=9)",
    "adakv(window=3,kernel=3)+calidrop",
    "adakv(window=3,kernel=3)+d2o-merge",
    "streaming(sinks=2,positions=cache)",
    "h2o(positions=cache)+caote",
    "h2o(positions=cache)+ada(share=0.1)",
]


def batch() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    rows = [random_ids(length, seed=length) for length in LENGTHS]
    ids = torch.zeros(len(rows), max(LENGTHS), dtype=torch.long)
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
@pytest.mark.each_once
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("mode", ["full", "block:16"])
@pytest.mark.parametrize("budget", [20, 0.5, 512])
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_what_they_are_alone(family, policy, budget, mode):
    model = kvtool.attach(peaky_model(family))
    ids, mask, rows = batch()
    new = random_ids(24, seed=9, batch=3)
    kept = None if policy == "full" else budget
    both = kvtool.build_cache(model, policy, kept, prefill=mode)
    together = [prefill(model, both, ids, mask)]
    together += [decode_step(model, both, tokens) for tokens in new.T]
    for i, row in enumerate(rows):
        one = kvtool.build_cache(model, policy, kept, prefill=mode)
        alone = [prefill(model, one, row)]
        alone += [decode_step(model, one, token[None]) for token in new[i]]
        ours = torch.stack([logits[i] for logits in together])
        torch.testing.assert_close(ours, torch.cat(alone), atol=3e-4, rtol=3e-4)
        same_row(both, one, i)


@pytest.mark.parametrize("policy", ["streaming", "quest", "exact-topk", "rocketkv(window=3)"])
def test_a_share_of_padding_alone_is_no_reason_to_refuse_the_others(policy):
    model = kvtool.attach(peaky_model("llama"))
    row, new = random_ids(60, seed=60), random_ids(4, seed=9)
    ids, mask = torch.zeros(2, 60, dtype=torch.long), torch.zeros(2, 60, dtype=torch.long)
    ids[1], mask[1] = row[0], 1
    both, one = (kvtool.build_cache(model, policy, 0.5) for _ in range(2))
    together = [prefill(model, both, ids, mask)]
    together += [decode_step(model, both, tokens.expand(2)) for tokens in new.T]
    alone = [prefill(model, one, row)] + [decode_step(model, one, tokens) for tokens in new.T]
    ours = torch.stack([logits[1] for logits in together])
    torch.testing.assert_close(ours, torch.cat(alone), atol=3e-4, rtol=3e-4)
    same_row(both, one, 1)


def test_a_batch_of_padding_alone_is_refused():
    model = kvtool.attach(peaky_model("llama"))
    ids = torch.zeros(2, 9, dtype=torch.long)
    for policy in ("h2o", "kvzip", "quest"):
        with pytest.raises(kvtool.UsageError, match="the prompt is empty"):
            prefill(model, instructed(kvtool.build_cache(model, policy, 20)), ids, ids)


LAST_BLOCKS = [
    "recency",
    "h2o+caote",
    "tova",
    "snapkv(window=1)",
    "sirllm(sinks=1)",
    "streaming(sinks=1,positions=cache)",
]
PLAIN = ["h2o+caote", "tova", "streaming", "snapkv(window=3)", "tova(positions=cache)"]
PLAIN += ["duoattention", "h2o+duo"]


@pytest.mark.parametrize("policy", PLAIN)
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


@pytest.mark.each_once
@pytest.mark.parametrize(
    "policy",
    [
        "h2o+caote",
        "h2o(positions=cache)+caote",
        "h2o+ada",
        "tova+ada",
        "adakv(window=3,kernel=3)",
        "streaming+cam(deterministic=true,m=5)",
        "h2o+cam",
        "duoattention",
    ],
)
@pytest.mark.parametrize("mode", ["full", "block:16"])
@pytest.mark.parametrize("shortest", [12, 1])
def test_a_second_turn_of_padded_rows(mode, policy, shortest):
    """Rows of different length twice: padding lies before the text and between the turns."""
    model = kvtool.attach(peaky_model("llama"))
    ids, mask, rows = batch()
    turn = random_ids(21, seed=5, batch=3)
    turn_mask = torch.ones_like(turn)
    turn_mask[1, :-shortest] = 0
    both = kvtool.build_cache(model, policy, 20, prefill=mode)
    prefill(model, both, ids, mask)
    together = prefill(model, both, turn, turn_mask)
    for i, row in enumerate(rows):
        one = kvtool.build_cache(model, policy, 20, prefill=mode)
        prefill(model, one, row)
        alone = prefill(model, one, turn[i : i + 1, turn_mask[i].bool()])
        torch.testing.assert_close(together[i : i + 1], alone, atol=3e-4, rtol=3e-4)
        same_row(both, one, i)


@pytest.mark.each_once
@pytest.mark.parametrize(
    ("lengths", "block", "budget"),
    [
        ((33, 32), 16, 20),  # the last block is one token in one row, padding in the other
        ((13, 9), 1, 5),  # every block is one token
        ((40, 39), 2, 0.5),  # budgets differ long before a row is padded
        ((58, 30), 5, 0.35),
    ],
)
@pytest.mark.parametrize("policy", LAST_BLOCKS)
def test_padding_that_only_the_last_blocks_show(policy, lengths, block, budget):
    model = kvtool.attach(peaky_model("llama"))
    rows = [random_ids(length, seed=length) for length in lengths]
    ids = torch.zeros(2, max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, -row.shape[1] :], mask[i, -row.shape[1] :] = row[0], 1
    new = random_ids(8, seed=9, batch=2)
    both = kvtool.build_cache(model, policy, budget, prefill=f"block:{block}")
    together = [prefill(model, both, ids, mask)]
    together += [decode_step(model, both, tokens) for tokens in new.T]
    for i, row in enumerate(rows):
        one = kvtool.build_cache(model, policy, budget, prefill=f"block:{block}")
        alone = [prefill(model, one, row)]
        alone += [decode_step(model, one, token[None]) for token in new[i]]
        ours = torch.stack([logits[i] for logits in together])
        torch.testing.assert_close(ours, torch.cat(alone), atol=1e-4, rtol=1e-4)
        same_row(both, one, i)


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
