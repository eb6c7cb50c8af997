"""A row that joins a batch while it runs is that row alone, and the others do not notice."""

from __future__ import annotations

import re

import pytest
import torch

import kvtool
from kvtool.cache.whole.batching import append_entries, take_entry
from kvtool.errors import KvtoolError
from kvtool.generation import decode_step, prefill
from kvtool.policies.table import describe
from tests.coded import TIE_LOGITS, codes_of, moved
from tests.models_for_tests import RECURRENT, family_model, peaky_model, random_ids
from tests.tiers import first

JOINED = [
    "full",
    "full+int8",
    "full+int4",
    "full+k8v4",
    "full+int(keys=4,values=8)",
    "random",
    "recency",
    "streaming(sinks=2)",
    "streaming(positions=cache,sinks=2)",
    "scissorhands",
    "h2o",
    "h2o+caote",
    "h2o+fastcaote",
    "h2o+every(steps=4)",
    "h2o+cam",
    "h2o+int8",
    "h2o+fp8",
    "h2o+d2o-alloc",
    "h2o+d2o-exp",
    "h2o+d2o-reciprocal",
    "tova+duo",
    "h2o+uniform",
    "h2o+ada(share=0.1)",
    "h2o+ada(share=0.1)+int8",
    "h2o+every(steps=4)+int4",
    "h2o(positions=cache)",
    "tova",
    "tova+caote+int8",
    "roco(sinks=1,protect_recent=2)",
    "snapkv(window=3,kernel=3)",
    "snapkv(window=3,kernel=3)+pyramid",
    "snapkv(window=3,kernel=3)+chunk(length=4)",
    "snapkv(window=3,kernel=3)+int8",
    "snapkv(window=3,kernel=3)+refit",
    "snapkv(window=3,kernel=3)+critical",
    "pyramidkv(window=3,kernel=3)",
    "adakv(window=3,kernel=3)",
    "adakv(window=3,kernel=3)+fp8",
    "duoattention",
    "d2o",
    "roco(sinks=1,protect_recent=2)+d2o-merge",
    "keydiff",
    "knorm",
    "expected",
    "lagkv(sinks=1,lag=4,rank=false)",  # ranks tie, and of ties the order of the slots decides
    "rkv(window=3,buffer=8)",
    "triattention(every=8,prompt=false)",
    "snapkv(window=3,kernel=3)+every(steps=4)",
    "adakv(window=3,kernel=3)+every(steps=4)",
    "pyramidinfer(min_context=2,sinks=1)",
]
APART = [  # with the reason, below
    "quest",
    "exact-topk",
    "sparq",
    "loki",
    "hsa",
    "rocketkv",
    "rocketkv-mt",
    "sirllm",
    "kvzip",
    "h2o+calidrop",
    "snapkv(window=3)+calidrop",
]
BUDGETS = [(20, "full"), (0.5, "full"), (20, "block:8"), ("28KiB", "full")]
TOGETHER = ["h2o", "roco(sinks=1,protect_recent=2)", "h2o+caote", "h2o+int8", "d2o"]


def read(model, policy, budget, length: int, seed: int):
    tokens, mode = budget
    bound = None if policy.startswith("full") else tokens
    if "refit" in policy:
        mode = "full"  # it takes no other
    cache = kvtool.build_cache(model, policy, bound, prefill=mode)
    return cache, prefill(model, cache, random_ids(length, seed=seed), new_tokens=16)


def run_alone(model, policy, budget, length: int, seed: int, steps: int):
    """The cache of a prompt that is answered alone, and before every token the logits and codes."""
    cache, logits = read(model, policy, budget, length, seed)
    shown, codes = [logits], [codes_of(cache, 0) if in_codes(policy) else []]
    for _ in range(steps):
        shown.append(decode_step(model, cache, shown[-1].argmax(-1)))
        codes.append(codes_of(cache, 0) if in_codes(policy) else [])
    return cache, torch.cat(shown), codes


def in_codes(policy: str) -> bool:
    """Whether a last bit may move a code: 4 bits are too few for that to happen in these tests."""
    return bool({"int8", "fp8", "k8v4", "int(keys=4,values=8)"} & set(policy.split("+")))


def same_logits(logits, expected, cache, row, codes) -> None:
    """Logits are equal, or a number that lay between two codes has been rounded to the other one.

    The last bit of a key depends on the shape of a batch, so no rounding can prevent that.

    Args:
        codes: what the entry alone holds, nothing where the policy stores no codes.
    """
    if codes and (logits - expected).abs().max() > 1e-4:
        _, differ, *farthest = moved(codes_of(cache, row), codes)
        assert differ > 0
        assert max(farthest) == 1
        assert (logits - expected).abs().max() < TIE_LOGITS
    else:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def same_row(both, alone, row: int) -> None:
    for layer in range(2):
        expected = alone.kept_positions(layer)[0]
        ours = both.kept_positions(layer)[row]
        assert torch.equal(ours[:, : expected.shape[1]], expected)
        assert (ours[:, expected.shape[1] :] == -1).all()


def joined() -> list:
    """Every policy with one of the budgets; `TOGETHER` with the first."""
    rest = [policy for policy in JOINED if policy not in TOGETHER]
    found = [(policy, BUDGETS[0]) for policy in TOGETHER]
    found += [(policy, BUDGETS[i % 4]) for i, policy in enumerate(rest)]
    tried = ("h2o+caote", "full+k8v4", "adakv(window=3,kernel=3)")
    return [
        pytest.param(*case, marks=[] if case[0] in tried else pytest.mark.exhaustive)
        for case in found
    ]


@pytest.mark.parametrize(("policy", "budget"), joined())
def test_a_row_is_what_it_is_alone_from_when_it_joins_until_after_it_leaves(policy, budget):
    """Behind the batch with a generated token and a further turn; the batch does not notice."""
    model = kvtool.attach(
        peaky_model("llama", head_dim=32 if re.search("int4|k8v4|keys=4", policy) else 16)
    )
    # (length, seed, steps): the second leaves after 4 steps, and the third and fourth come
    texts = [(37, 1, 10), (60, 2, 4), (11, 3, 6), (53, 4, 6)]
    alone = [run_alone(model, policy, budget, *text) for text in texts]
    cache, logits = read(model, policy, budget, *texts[0][:2])
    other, more = read(model, policy, budget, *texts[1][:2])
    append_entries(cache, [other])
    assert (cache.get_seq_length(), cache.tokens_seen()) == (60, [37, 60])
    assert not any(layer.is_initialized for layer in other.slot_layers)
    logits, place, rows, together = torch.cat([logits, more]), [0, 0], [0, 1], False
    for step in range(11):
        for row, text in enumerate(rows):
            _, expected, codes = alone[text]
            at = place[row]
            same_logits(logits[row], expected[at], cache, row, codes[at])
        if step == 4:
            cache.batch_select_indices(torch.tensor([0]))
            caches, more = zip(
                *(read(model, policy, budget, *text[:2]) for text in texts[2:]), strict=True
            )
            append_entries(cache, caches)
            logits, place, rows = torch.cat([logits[:1], *more]), [4, 0, 0], [0, 2, 3]
        if step < 10:
            logits = decode_step(model, cache, logits.argmax(-1))
            together |= bool(cache.groups.by_layer)
            place = [at + 1 for at in place]
    for row, text in enumerate(rows):
        same_row(cache, alone[text][0], row)
    if policy in TOGETHER:
        assert together  # layers decide in one go, in spite of rows of different lengths
    own, _, codes = alone[3]
    kept = [cache.kept_positions(layer) for layer in range(2)]
    taken = take_entry(cache, 2)
    assert (taken.tokens_seen(), taken.get_seq_length()) == ([59], 59)
    for layer, positions in enumerate(kept):
        assert torch.equal(cache.kept_positions(layer), positions)
    same_row(taken, own, 0)
    token, turn = logits[2:].argmax(-1), random_ids(9, seed=5)
    for feed in (
        lambda each: decode_step(model, each, token),
        lambda each: prefill(model, each, turn, new_tokens=2),
    ):
        expected = feed(own)
        same_logits(feed(taken), expected, taken, 0, codes_of(own, 0) if codes[-1] else [])
        same_row(taken, own, 0)
    assert taken.report().allocated_bytes <= 2 * own.report().allocated_bytes
    decode_step(model, cache, torch.tensor([1, 2, 3]))


def test_every_policy_joins_or_is_refused():
    tried = set(re.split(r"\+|\([^)]*\)", "+".join([*JOINED, *APART])))
    by_plan = {"optimal"}  # which uses a plan alone; its budgets of layers are as `pyramid`'s
    assert tried - {""} == {entry.name for entry in describe()} - by_plan


def test_rows_that_cannot_join_are_refused_with_the_reason():
    model = kvtool.attach(peaky_model("llama"))
    for policy in APART:
        cache, other = (kvtool.build_cache(model, policy, 20) for _ in range(2))
        with pytest.raises(KvtoolError, match="cannot join a running batch: "):
            append_entries(cache, [other])


@pytest.mark.parametrize("policy", ["h2o+caote", "h2o+int8"])
def test_layers_decide_alone_while_a_mask_may_leave_a_row_out(policy):
    model = kvtool.attach(peaky_model("llama"))
    texts, tokens = [(37, 1), (60, 2)], random_ids(9, seed=5, batch=2)
    alone = [read(model, policy, BUDGETS[0], *text)[0] for text in texts]
    cache, _ = read(model, policy, BUDGETS[0], *texts[0])
    append_entries(cache, [read(model, policy, BUDGETS[0], *texts[1])[0]])
    for step in range(9):
        new = tokens[:, step]
        if step in (4, 5):  # the second row has padding in place of a token
            mask = torch.ones(2, cache.get_seq_length() + 1, dtype=torch.long)
            mask[1, -1] = 0
            places = torch.tensor(cache.tokens_seen())[:, None]
            with torch.no_grad():
                logits = model(
                    new[:, None], attention_mask=mask, position_ids=places, past_key_values=cache
                ).logits[:, -1]
        else:
            logits = decode_step(model, cache, new)
        assert bool(cache.groups.by_layer) == (step not in (0, 4, 5))
        for row, own in enumerate(alone):
            if row == 0 or step not in (4, 5):
                expected = decode_step(model, own, new[row : row + 1])[0]
                torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)
    for row, own in enumerate(alone):
        same_row(cache, own, row)


@pytest.mark.parametrize(
    "family",
    first(1, ["gemma3", "falcon", "deepseek_v3", "gemma4", "llama4", "lfm2"]),
)
def test_rows_of_every_kind_of_family_join_or_are_refused(family):
    model = kvtool.attach(family_model(family))
    texts = [(47, 1), (9, 2), (30, 3)]  # the window of some layers is 24
    for policy in ("h2o", "snapkv(window=3)"):  # codes may round apart
        alone = [run_alone(model, policy, (16, "full"), *text, steps=6)[1] for text in texts]
        cache, logits = read(model, policy, (16, "full"), *texts[0])
        others, more = zip(
            *(read(model, policy, (16, "full"), *text) for text in texts[1:]), strict=True
        )
        if family in RECURRENT:
            with pytest.raises(KvtoolError, match="the model has recurrent layers"):
                append_entries(cache, others)
            continue
        append_entries(cache, others)
        logits = torch.cat([logits, *more])
        for step in range(7):
            expected = torch.stack([own[step] for own in alone])
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
            if step < 6:
                logits = decode_step(model, cache, expected.argmax(-1))


@pytest.mark.parametrize("policy", ["h2o", "full+int8"])
def test_rows_in_bfloat16_hold_what_they_hold_alone(policy):
    model = kvtool.attach(peaky_model("llama").to(torch.bfloat16))
    texts = [(37, 1), (60, 2)]
    alone = [read(model, policy, (20, "full"), *text)[0] for text in texts]
    cache, _ = read(model, policy, (20, "full"), *texts[0])
    append_entries(cache, [read(model, policy, (20, "full"), *texts[1])[0]])
    assert cache.slot_layers[0].slots.stored["keys"].dtype in (torch.bfloat16, torch.int8)
    for row, own in enumerate(alone):
        same_row(cache, own, row)
    tokens = torch.tensor([5, 9])
    both = decode_step(model, cache, tokens)
    for row, own in enumerate(alone):
        ours = decode_step(model, own, tokens[row : row + 1])[0]
        torch.testing.assert_close(both[row], ours, atol=0.05 * float(ours.abs().max()), rtol=0)
