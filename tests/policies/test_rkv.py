"""R-KV: worked example, slow twin, and a model against the oracle; what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtool
from kvtool import parse_policy
from kvtool.errors import KvtoolError, UsageError
from kvtool.generation import decode_step, prefill
from kvtool.maths.selection import pool_votes
from kvtool.policies.scores.rkv import redundancy, votes_of_queries
from tests.cache.test_oracle import follow
from tests.models_for_tests import anchored_model, family_model, peaky_model, prompt, random_ids
from tests.reference.policies import RKV, build

KEYS = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 1], [2, 0, 0, 0], [0, 0, 1, 1], [0, 2, 0, 0]]
QUERIES = [[1, 0, 1, 0], [0, 1, 0, 1]]


def ours(keys, queries, window, kernel, threshold=0.5, mix=0.1, scale=0.5):
    """Importance, redundancy and score of (slots, dim) keys by (group, rows, dim) queries."""
    keys = torch.as_tensor(keys, dtype=torch.float32)[None, None]
    query = torch.as_tensor(queries, dtype=torch.float32)[None, None]
    slots = keys.shape[2]
    places = torch.arange(slots, dtype=torch.int32).expand(1, 1, slots)
    newest = places >= slots - window
    valid = torch.ones(1, query.shape[3], dtype=torch.bool)
    votes = votes_of_queries(query, valid, keys, ~newest, scale)
    votes = pool_votes(votes, places, newest, kernel=kernel, pool="max")[0, 0]
    again = redundancy(keys, places, threshold)[0, 0]
    return votes, again, mix * votes - (1 - mix) * again


def theirs(keys, queries, window, kernel, threshold=0.5, mix=0.1, scale=0.5):
    slow = RKV(1, window, kernel, threshold, mix)
    slow.look([dict(enumerate(keys))])
    slow.ask([queries], scale)
    votes, again = slow.votes(0, keys, window), slow.repeated(keys)
    return votes, again, slow.scores(0, range(len(keys)), None)


def test_worked_scores():
    worked = (
        [0.246976, 0.284735, 0.284735, 0.284735],
        [0.187246, 0.193822, 0.166430, 0.158500],
        [-0.143824, -0.145966, -0.121313, -0.114177],
    )
    found, slow = ours(KEYS, [QUERIES], 2, 3), theirs(KEYS, [QUERIES], 2, 3)
    for expected, numbers, twin in zip(worked, found, slow, strict=True):
        assert numbers[:4].tolist() == pytest.approx(expected, abs=1e-6)
        assert twin[:4] == pytest.approx(expected, abs=1e-6)


@settings(max_examples=40)
@given(
    st.integers(0, 10_000),
    st.integers(4, 24),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 3, 5]),
    st.sampled_from([-1.0, 0.0, 0.4]),
)
def test_scores_equal_the_slow_twin(seed, slots, window, group, kernel, threshold):
    source = torch.Generator().manual_seed(seed)
    keys = torch.randn(slots, 5, generator=source)
    queries = torch.randn(group, window, 5, generator=source)
    found = ours(keys, queries, window, kernel, threshold)
    slow = theirs(keys.tolist(), queries.tolist(), window, kernel, threshold)
    for numbers, twin in zip(found, slow, strict=True):
        assert numbers.tolist() == pytest.approx(twin, abs=1e-5)


def test_redundancy_goes_by_position_and_leaves_out_empty_slots():
    source = torch.Generator().manual_seed(3)
    keys = torch.randn(1, 1, 9, 4, generator=source)
    places = torch.arange(9, dtype=torch.int32).expand(1, 1, 9)
    order = torch.tensor([3, 0, 8, 5, 1, 2, 7, 6, 4])
    expected = redundancy(keys, places, 0.2)
    mixed = redundancy(keys[:, :, order], places[..., order], 0.2)
    torch.testing.assert_close(mixed, expected[..., order])
    wider = torch.cat([keys, torch.randn(1, 1, 2, 4, generator=source)], 2)
    holes = torch.cat([places, torch.full((1, 1, 2), -1, dtype=torch.int32)], 2)
    found = redundancy(wider, holes, 0.2)
    torch.testing.assert_close(found[..., :9], expected)
    assert found[..., 9:].tolist() == [[[0.0, 0.0]]]


def test_of_many_tokens_that_are_alike_the_newest_stays():
    alike = [[1.0, 0, 0]] * 3 + [[0, 1.0, 0], [0, 0, 1.0]]
    again = ours(alike, [[[0.0, 0, 0]]], 1, 1)[1].tolist()
    # rows 0 and 1 leave 2 out, row 2 leaves 1 out: 0 is said by two, 1 by one, 2 by none
    assert again[0] > again[1] > again[2] == pytest.approx(again[3])


@pytest.mark.parametrize(
    ("mode", "options", "family"),
    [
        ("block:20", {"window": 3}, "llama"),
        ("full", {"window": 5, "kernel": 3, "threshold": 0.2}, "qwen3"),
    ],
)
def test_kept_positions_and_logits_equal_the_oracle(mode, options, family):
    inside = ",".join(f"{key}={value}" for key, value in options.items())
    follow(
        anchored_model(family),
        lambda: build("rkv", 20, "every", **options),
        f"rkv({inside},buffer=5)",
        20,
        mode,
        prompt(61),
        new=12,
    )


def test_what_is_held_is_told_to_the_slot():
    model, counts = peaky_model("llama"), []
    cache = kvtool.build_cache(model, "rkv(window=4,buffer=6)", 20)
    prefill(model, cache, random_ids(50))
    for token in random_ids(14, seed=2)[0]:
        counts.append(cache.kept_positions(0).shape[-1])
        decode_step(model, cache, token[None])
    assert counts == [20 + i % 6 for i in range(14)]
    assert cache.slot_layers[0].slots.capacity == 26
    newest = range(cache.tokens_seen()[0] - 4, cache.tokens_seen()[0])
    assert set(newest) <= set(cache.kept_positions(1)[0, 0].tolist())


def test_fewer_tokens_than_the_window_vote_alone():
    model = peaky_model("llama")
    cache = kvtool.build_cache(model, "rkv(window=4,buffer=4)", 6)
    prefill(model, cache, random_ids(2))
    for token in random_ids(12, seed=2)[0]:
        assert torch.isfinite(decode_step(model, cache, token[None])).all()


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("rkv(buffer=4)", "buffer must be at least window, which is 8, got 4"),
        ("rkv(window=0)", "window must be 1 or more, got 0"),
        ("rkv(kernel=4)", "kernel must be odd and 1 or more, got 4"),
        ("rkv(mix=2)", "mix must be between 0 and 1"),
        ("rkv(threshold=1.5)", "threshold must be between -1 and 1"),
        ("rkv+every", "`rkv` cuts every so many tokens by itself"),
        ("rkv+ada", "`rkv` keeps the newest queries of a whole layer"),
        ("rkv+caote", "`caote` weighs values by attention scores"),
        ("rkv+quest", "readers are bases"),
    ],
)
def test_what_makes_no_sense_is_refused(policy, told):
    with pytest.raises(UsageError) as found:
        parse_policy(policy)
    if "readers" not in told:
        assert told in str(found.value)


def test_a_budget_of_the_window_alone_is_refused():
    with pytest.raises(UsageError, match="budget 8 is not above window 8"):
        parse_policy("rkv").check_budget(8)


def test_attention_that_shows_no_queries_is_refused():
    model = family_model("falcon")
    cache = kvtool.build_cache(model, "rkv(window=4,buffer=4)", 12)
    with pytest.raises(KvtoolError, match=r"`rkv\(.*\)` looks back from queries"):
        model.generate(random_ids(20), past_key_values=cache, max_new_tokens=2)
    model = family_model("deepseek_v3")
    cache = kvtool.build_cache(model, "rkv(window=4,buffer=4)", 12)
    with pytest.raises(KvtoolError, match="needs keys that are stored as they are attended"):
        model.generate(random_ids(20), past_key_values=cache, max_new_tokens=2)
