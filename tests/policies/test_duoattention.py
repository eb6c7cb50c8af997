"""DuoAttention on models: which heads keep what, in bytes, batches, turns and files."""

import pytest
import torch

import kvtool
from kvtool.generation import decode_step, prefill
from kvtool.policies.allocate.duo import rank_heads
from tests.models_for_tests import peaky_model, random_ids
from tests.reference.duoattention import Head
from tests.tiers import first

LAYERS, HEADS = 3, 4
SCORES = torch.tensor([[0.1, 0.9, 0.0, 0.2], [0.8, 0.3, 0.4, 0.0], [0.5, 0.5, 0.6, 0.1]])
SHARE_BUDGET = 800  # of 960 tokens: (800 - 640) / (960 - 640) = half of the heads


@pytest.fixture(scope="module")
def model():
    return kvtool.attach(peaky_model("llama", num_hidden_layers=LAYERS, num_key_value_heads=HEADS))


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "Scores.tsv"
    path.write_text("\n".join("\t".join(map(str, row)) for row in SCORES.tolist()))
    return f"duoattention(scores={path})"


def best_half():
    return (rank_heads(SCORES) < LAYERS * HEADS // 2).tolist()


def head_positions(cache, layer, row, head):
    return [p for p in cache.kept_positions(layer)[row, head].tolist() if p >= 0]


@pytest.mark.parametrize("prefill_mode", ["full", "block:100"])
def test_retrieval_heads_hold_everything_and_streaming_heads_640(model, policy, prefill_mode):
    cache = kvtool.build_cache(model, policy, SHARE_BUDGET, prefill=prefill_mode)
    prefill(model, cache, random_ids(960))
    for token in range(2, 12):
        decode_step(model, cache, torch.tensor([token]))
    filled = 0
    for layer, row in enumerate(best_half()):
        for head, retrieves in enumerate(row):
            kept = head_positions(cache, layer, 0, head)
            streaming = [*range(128), *range(970 - 512, 970)]
            assert kept == (list(range(970)) if retrieves else streaming)
            filled += len(kept)
    report = cache.report()
    assert report.kv_bytes == filled * 16 * 2 * 4
    assert report.allocated_bytes < report.kv_bytes * 1.2
    assert report.full_bytes == LAYERS * HEADS * 970 * 16 * 2 * 4


def test_attention_is_that_over_what_heads_keep(model, policy):
    """Against a full cache whose masks hide what each head has dropped."""
    cache = kvtool.build_cache(model, policy, SHARE_BUDGET)
    ids = random_ids(960)
    prefill(model, cache, ids)
    token = torch.tensor([7])
    queries = {}

    def watch(step, call, out):
        queries[step.layer.index] = (call.query, call.raw_key, out)

    cache.watch_steps(watch)
    full = kvtool.build_cache(model, "full")
    stored = {}
    full.watch_steps(
        lambda step, call, out: stored.setdefault(step.layer.index, (call.raw_key, call.raw_value))
    )
    prefill(model, full, ids)
    decode_step(model, cache, token)
    query, key, out = queries[0]  # the first layer's input does not depend on the policy
    for head in range(8):
        own = head // 2
        kept = head_positions(cache, 0, 0, own)[:-1]
        keys = torch.cat([stored[0][0][0, own, kept], key[0, own]])
        last_value = (
            model.model.layers[0]
            .self_attn.v_proj(
                model.model.layers[0].input_layernorm(model.model.embed_tokens(token))
            )
            .view(HEADS, 16)[own]
        )
        values = torch.cat([stored[0][1][0, own, kept], last_value[None]])
        weights = (keys @ query[0, head, 0] * 16**-0.5).softmax(0)
        torch.testing.assert_close(out[0, head, 0], weights @ values, atol=1e-5, rtol=1e-4)


def test_small_budgets_stream_everywhere(model):
    cache = kvtool.build_cache(model, "duoattention", 50)
    prefill(model, cache, random_ids(120))
    for layer in range(LAYERS):
        for head in range(HEADS):
            assert head_positions(cache, layer, 0, head) == [*range(10), *range(80, 120)]


def twins(budget):
    """A slow head for every head of the model: [layer][head]."""
    ranks = rank_heads(SCORES).tolist()
    return [[Head(budget, rank, LAYERS * HEADS) for rank in row] for row in ranks]


def feed_twins(text, tokens, block):
    for head in [head for layer in text for head in layer]:
        for start in range(0, tokens, block or tokens):
            head.block(min(block or tokens, tokens - start))


def same_as_twins(cache, row, text):
    for layer, heads in enumerate(text):
        for head, twin in enumerate(heads):
            assert head_positions(cache, layer, row, head) == twin.kept


def padded(*rows):
    longest = max(len(row) for row in rows)
    ids, mask = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(2))
    for i, row in enumerate(rows):
        if len(row):
            ids[i, -len(row) :], mask[i, -len(row) :] = row, 1
    return ids, mask


def texts(lengths, seed=0):
    return [random_ids(length, seed=seed + i)[0] for i, length in enumerate(lengths)]


ROWS = [  # budget, turns, block
    (40, [(60, 36), (3, 20), (1, 1)], 16),  # one row fits, the other does not
    (700, [(705, 300), (30, 2)], None),  # heads that retrieve hold little more than the others
    # the exhaustive tier from here
    (40, [(60, 36, 39, 41), (2, 9, 1, 5)], None),
]


@pytest.mark.parametrize("case", first(2, ROWS), ids=str)
def test_rows_that_fit_beside_rows_that_do_not(model, policy, case):
    budget, turns, block = case
    mode = "full" if block is None else f"block:{block}"
    cache = kvtool.build_cache(model, policy, budget, prefill=mode)
    rows = [twins(budget) for _ in turns[0]]
    alone = [kvtool.build_cache(model, policy, budget, prefill=mode) for _ in turns[0]]
    for turn, lengths in enumerate(turns):
        words = texts(lengths, seed=10 * turn)
        logits = prefill(model, cache, *padded(*words))
        for row, tokens in enumerate(lengths):
            single = prefill(model, alone[row], words[row][None])[0]
            torch.testing.assert_close(logits[row], single, atol=1e-4, rtol=1e-4)
            feed_twins(rows[row], tokens, block)
            same_as_twins(cache, row, rows[row])
            same_as_twins(alone[row], 0, rows[row])
        for token in (3, 4, 5, 6, 7):
            logits = decode_step(model, cache, torch.tensor([token] * len(rows)))
            for row, text in enumerate(rows):
                single = decode_step(model, alone[row], torch.tensor([token]))[0]
                torch.testing.assert_close(logits[row], single, atol=1e-4, rtol=1e-4)
                for head in [head for layer in text for head in layer]:
                    head.token()
                same_as_twins(cache, row, text)
    most = max(budget + 1, cache.kept_positions(0).shape[2])
    filled = len(rows) * LAYERS * HEADS * most * 16 * 2 * 4
    assert cache.meter.held < 1.5 * filled


SHORT = [  # lengths, block, modifier
    ([725, 1, 15], None, ""),
    ([750], 105, "streaming(sinks=4)+duo"),
    ([725, 16], None, "streaming(sinks=4)+duo"),
    ([725, 1, 1], None, ""),
]


@pytest.mark.parametrize("case", first(2, SHORT), ids=str)
def test_a_short_block_or_turn_leaves_no_head_above_its_limit(model, policy, case):
    """At a budget of 660 a share of 20 / (n - 640) retrieves, so whole layers stream."""
    lengths, block, modifier = case
    name = policy if not modifier else modifier + policy.removeprefix("duoattention")
    mode = "full" if block is None else f"block:{block}"
    cache = kvtool.build_cache(model, name, 660, prefill=mode)
    text = twins(660)
    for turn, tokens in enumerate(lengths):
        if tokens == 1:  # a turn of one token has to be called one
            with cache.prompt():
                model(torch.tensor([[5]]), past_key_values=cache)
        else:
            prefill(model, cache, random_ids(tokens, seed=turn))
        feed_twins(text, tokens, block)
    for _ in range(3):
        for layer, heads in enumerate(text):
            for head, twin in enumerate(heads):
                kept = head_positions(cache, layer, 0, head)
                assert kept == twin.kept if not modifier else len(kept) == len(twin.kept)
        decode_step(model, cache, torch.tensor([9]))
        for head in [head for layer in text for head in layer]:
            head.token()
    assert any(all(head.limit == 640 for head in layer) for layer in text)


def test_turns_and_files_go_on(model, policy, tmp_path):
    cache = kvtool.build_cache(model, policy, SHARE_BUDGET)
    prefill(model, cache, random_ids(960))
    prefill(model, cache, random_ids(50, seed=4))
    kvtool.save_cache(cache, tmp_path / "a.safetensors", model=model)
    (tmp_path / "Scores.tsv").unlink()  # the ranks are in the file
    loaded = kvtool.load_cache(tmp_path / "a.safetensors", model)
    for token in range(2, 8):
        token = torch.tensor([token])
        torch.testing.assert_close(
            decode_step(model, loaded, token), decode_step(model, cache, token)
        )
    again = [prefill(model, one, random_ids(30, seed=5)) for one in (cache, loaded)]
    torch.testing.assert_close(*again)


def test_the_proxy_is_measured_once_per_model(model):
    ranks = kvtool.build_cache(model, "duoattention", 700).link.head_ranks
    assert sorted(ranks.flatten().tolist()) == list(range(LAYERS * HEADS))
    assert kvtool.build_cache(model, "streaming+duo", 700).link.head_ranks is ranks
