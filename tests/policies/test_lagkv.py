"""LagKV: results, ranks and what is kept anyway, against the worked example and the slow twin."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool import parse_policy
from kvtool.errors import UsageError
from kvtool.maths.selection import keep_top
from kvtool.policies.parts import SlotView
from kvtool.policies.scores import lagkv
from kvtool.policies.scores.lagkv import ranks, results_of_partitions
from tests.reference.policies import build

KEYS = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 1], [2, 0, 0, 0], [0, 0, 1, 1], [0, 2, 0, 0]]
VALUES = [[1, 0], [0, 2], [3, 0], [0, 1], [1, 1], [2, 2]]


def view_of(keys, values, positions=None, budget=8):
    """The slots of a layer, (batch, kv_heads, slots, dim)."""
    slots = keys.shape[2]
    places = torch.arange(slots) if positions is None else positions
    places = places.to(torch.int32).expand(keys.shape[:3])
    return SlotView(
        values=(values,),
        positions=places,
        tokens_seen=int(places.max()) + 1,
        budget=budget,
        held=(places >= 0).sum(-1, keepdim=True),
        keys=(keys,),
    )


def random_view(seed, shape, budget, empty=0):
    """Slots in any order with gaps between their positions, some of them empty, by head."""
    source = torch.Generator().manual_seed(seed)
    slots = shape[-1]
    order = [
        torch.randperm(2 * slots, generator=source)[:slots] for _ in range(shape[0] * shape[1])
    ]
    positions = torch.stack(order).unflatten(0, shape[:2])
    for i, head in enumerate(positions.flatten(0, 1)):
        head[: empty * i] = -1
    keys, values = (torch.randn(*shape, dim, generator=source) for dim in (6, 5))
    return view_of(keys, values, positions, budget)


def of_head(tensors, view, entry, head):
    """What slots of a head hold, by position."""
    places = view.positions[entry, head].tolist()
    held = zip(places, tensors[0][entry, head].tolist(), strict=True)
    return {place: vector for place, vector in sorted(held) if place >= 0}


def follow(policy, view, budget_of=lambda entry: 8, **options):
    """Compare scores and protection of each head with those of the slow twin."""
    score = parse_policy(policy).ranking
    found, stays = score.importance({}, view, None), score.protected({}, view, 1)
    for entry in range(found.shape[0]):
        slow = build("lagkv", budget_of(entry), **options)
        for head in range(found.shape[1]):
            keys, values = (of_head(each, view, entry, head) for each in (view.keys, view.values))
            slow.look({head: keys})
            wanted = dict(zip(keys, slow.scores(head, list(keys), values), strict=True))
            forced = slow.forced(head, list(keys), 1)
            for slot, place in enumerate(view.positions[entry, head].tolist()):
                if place >= 0:
                    assert found[entry, head, slot].item() == pytest.approx(wanted[place], abs=1e-6)
                    assert bool(stays[entry, head, slot]) == (place in forced)


def test_worked_results_and_ranks():
    keys, values = (torch.tensor(rows).float()[None, None] for rows in (KEYS, VALUES))
    results = [0.339195, 0.660805, 0.710937, 0.289063]
    found = results_of_partitions(keys.unflatten(2, (-1, 2)), values.unflatten(2, (-1, 2)))
    torch.testing.assert_close(found.flatten(), torch.tensor(results), atol=1e-6, rtol=0)
    view = view_of(keys, values, budget=4)
    raw = parse_policy("lagkv(sinks=0,lag=2,rank=false)").ranking.importance({}, view, None)
    expected = torch.tensor([*results, 1, 1])
    torch.testing.assert_close(raw[0, 0], expected, atol=1e-6, rtol=0)
    score = parse_policy("lagkv(sinks=0,lag=2)").ranking
    ranked, stays = score.importance({}, view, None), score.protected({}, view, 2)
    assert ranked.tolist() == [[[0, 0.5, 0.5, 0, 1, 1]]]
    assert stays.tolist() == [[[False, False, False, False, True, True]]]
    assert keep_top(ranked, view.positions, 4, stays, 4)[1].tolist() == [[[1, 2, 4, 5]]]
    assert keep_top(ranked, view.positions, 5, stays, 5)[1].tolist() == [[[0, 1, 2, 4, 5]]]
    for rank, wanted in ((False, results), (True, [0, 0.5, 0.5, 0])):
        slow = build("lagkv", 4, sinks=0, lag=2, rank=rank)
        slow.look([dict(enumerate(KEYS))])
        scores = slow.scores(0, range(6), dict(enumerate(VALUES)))
        assert scores == pytest.approx([*wanted, 1, 1], abs=1e-6)
        assert slow.forced(0, range(6), 2) == {4, 5}


def test_of_equal_results_the_lower_position_ranks_lower():
    assert ranks(torch.tensor([[0.2, 0.1, 0.2, 0.1, 0.4]])).tolist() == [[2, 0, 3, 1, 4]]


def test_a_channel_without_a_range_counts_as_zero():
    keys = torch.randn(1, 1, 6, 4, generator=torch.Generator().manual_seed(1))
    keys[:, :, 3:, 2] = 7.0
    found = results_of_partitions(keys.unflatten(2, (2, 3)), keys.unflatten(2, (2, 3)))
    keys[:, :, :3, 2] = 1000.0  # whatever it holds itself
    other = results_of_partitions(keys.unflatten(2, (2, 3)), keys.unflatten(2, (2, 3)))
    assert found.isfinite().all()
    assert torch.equal(found, other)


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.integers(2, 30), st.booleans())
def test_scores_equal_the_slow_twin_in_any_order_of_slots_with_gaps(seed, slots, rank):
    view = random_view(seed, (1, 2, slots), budget=8)
    spelled = f"lagkv(sinks=2,lag=3,rank={str(rank).lower()})"
    follow(spelled, view, sinks=2, lag=3, rank=rank)


@pytest.mark.parametrize("sinks", [0, 3])
def test_heads_that_hold_different_counts_have_partitions_of_their_own(sinks):
    view = random_view(5, (2, 3, 29), budget=8, empty=4)
    assert len(view.held.unique()) == 6
    follow(f"lagkv(sinks={sinks},lag=2)", view, sinks=sinks, lag=2)


@pytest.mark.parametrize("lag", [2, 128])
def test_entries_with_budgets_of_their_own_have_lags_of_their_own(lag):
    view = replace(
        random_view(6, (3, 2, 40), budget=0), budget=torch.tensor([12, 30, 200])[:, None, None]
    )
    policy = parse_policy(f"lagkv(lag={lag})")
    assert policy.score._lag(view.budget).flatten().tolist() == (
        [2, 2, 2] if lag == 2 else [2, 6, 49]
    )
    follow(f"lagkv(lag={lag})", view, lambda entry: [12, 30, 200][entry], lag=lag)


def test_long_prompts_are_scored_a_part_at_a_time(monkeypatch):
    view = random_view(7, (1, 2, 60), budget=40)
    score = parse_policy("lagkv(lag=4,rank=false)").ranking
    whole = score.importance({}, view, None)
    monkeypatch.setattr(lagkv, "_TOKENS", 9)
    assert torch.equal(score.importance({}, view, None), whole)


@pytest.mark.parametrize(
    ("budget", "lag"), [(8, 2), (12, 2), (16, 3), (100, 24), (259, 63), (260, 128), (4096, 128)]
)
def test_short_budgets_have_short_partitions(budget, lag):
    policy = parse_policy("lagkv")
    assert policy.score._lag(budget) == lag
    assert policy.score.reserved(budget) == {"sinks": 4, "lag": 2 * lag - 1}
    policy.check_budget(budget)
    assert policy.min_budget == 8


def test_every_partition_gives_up_the_same_share():
    view = random_view(8, (1, 1, 104), budget=54)
    view = replace(view, positions=torch.arange(104, dtype=torch.int32)[None, None])
    score = parse_policy("lagkv(lag=10)").ranking
    stays = score.protected({}, view, 50)
    kept = keep_top(score.importance({}, view, None), view.positions, 54, stays, 54)[1][0, 0]
    counts = torch.bincount((kept[kept >= 4] - 4) // 10)
    assert counts.tolist() == [5, 5, 5, 5, 4, 4, 4, 4, 4, 10]  # 90 behind the sinks, 40 stay


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("lagkv+caote", "`caote` weighs values by attention scores, and `lagkv` has none"),
        ("lagkv+every", "`lagkv` scores prompts only"),
        ("lagkv(sinks=-1)", "lagkv: sinks must be 0 or more, got -1"),
        ("lagkv(lag=1)", "lagkv: lag must be 2 or more, got 1"),
        ("lagkv(window=3)", "window"),
    ],
)
def test_what_makes_no_sense_is_refused(policy, why):
    with pytest.raises(UsageError, match=why):
        parse_policy(policy)


def test_a_budget_that_is_kept_anyway_is_refused():
    with pytest.raises(UsageError, match="budget 7 is not above sinks 4 \\+ lag 3 = 7"):
        parse_policy("lagkv").check_budget(7)
