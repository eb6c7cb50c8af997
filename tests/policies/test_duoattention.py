"""DuoAttention on models: which heads keep what, in bytes, batches, turns and files."""

import pytest
import torch

import kvtool
from kvtool.errors import UsageError
from kvtool.generation import decode_step, prefill
from kvtool.policies.allocate.duo import rank_heads
from tests.models_for_tests import peaky_model, random_ids

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

    def watch(taken, call, out):
        queries[taken.layer.index] = (call.query, call.raw_key, out)

    cache.watch = watch
    full = kvtool.build_cache(model, "full")
    stored = {}
    full.watch = lambda taken, call, out: stored.setdefault(
        taken.layer.index, (call.raw_key, call.raw_value)
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


def test_rows_of_a_padded_batch_have_their_own_share(model, policy):
    rows = [random_ids(960)[0], random_ids(850, seed=1)[0], random_ids(300, seed=2)[0]]
    ids, mask = torch.zeros(3, 960, dtype=torch.long), torch.zeros(3, 960, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, 960 - len(row) :], mask[i, 960 - len(row) :] = row, 1
    both = kvtool.build_cache(model, policy, SHARE_BUDGET)
    logits = prefill(model, both, ids, mask)
    alone = []
    for i, row in enumerate(rows):
        cache = kvtool.build_cache(model, policy, SHARE_BUDGET)
        torch.testing.assert_close(
            prefill(model, cache, row[None])[0], logits[i], atol=1e-4, rtol=0
        )
        alone.append(cache)
    for token in (3, 4, 5):
        logits = decode_step(model, both, torch.tensor([token] * 3))
        for i, cache in enumerate(alone):
            single = decode_step(model, cache, torch.tensor([token]))[0]
            torch.testing.assert_close(logits[i], single, atol=1e-4, rtol=0)
    for layer in range(LAYERS):
        for i, cache in enumerate(alone):
            for head in range(HEADS):
                assert head_positions(both, layer, i, head) == head_positions(cache, layer, 0, head)


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
    ranks = kvtool.build_cache(model, "duoattention", 700).head_ranks
    assert sorted(ranks.flatten().tolist()) == list(range(LAYERS * HEADS))
    assert kvtool.build_cache(model, "streaming+duo", 700).head_ranks is ranks


def test_a_model_that_is_not_attached_and_scores_that_do_not_fit_are_refused(tmp_path):
    fresh = peaky_model("llama")
    with pytest.raises(UsageError, match="not attached"):
        kvtool.build_cache(fresh, "duoattention", 700)
    path = tmp_path / "s.tsv"
    path.write_text("1 2 3\n")
    with pytest.raises(UsageError, match="this model has 2 of 2"):
        kvtool.build_cache(fresh, f"duoattention(scores={path})", 700)
    with pytest.raises(UsageError, match="budget 0"):
        kvtool.build_cache(fresh, "duoattention", 0)
