"""KeyDiff: scores and choice against the worked example and the slow twin."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtool
from kvtool import parse_policy
from kvtool.errors import UsageError
from kvtool.maths.selection import keep_top
from kvtool.policies.parts import SlotView
from kvtool.policies.scores.keydiff import distances_from_anchors
from tests.reference.policies import build

KEYS = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 1], [2, 0, 0, 0], [0, 0, 1, 1], [0, 2, 0, 0]]


def view_of(*keys, positions=None, held=None, seen=None):
    """The slots of a layer, or of several in one view: (kv_heads, slots, dim) of each."""
    slots = keys[0].shape[1]
    places = torch.arange(slots) if positions is None else positions
    shape = (len(keys), keys[0].shape[0], slots)
    return SlotView(
        values=tuple(torch.zeros(1, *layer.shape) for layer in keys),
        positions=places.to(torch.int32).expand(shape),
        tokens_seen=slots if seen is None else seen,
        budget=slots - 1,
        held=slots if held is None else held,
        keys=tuple(layer[None] for layer in keys),
    )


def scores(policy, view):
    return parse_policy(policy).ranking.importance({}, view, None)


def test_worked_scores_and_the_three_that_tie():
    keys = torch.tensor(KEYS).float()[None]
    expected = [-0.684153, -0.915197, -0.684153, -0.684153, -0.379087, -0.610131]
    found = scores("keydiff", view_of(keys))
    torch.testing.assert_close(found[0, 0], torch.tensor(expected), atol=1e-6, rtol=0)
    positions = torch.arange(6, dtype=torch.int32).expand(1, 1, 6)
    assert keep_top(found, positions, 4, None, 4)[1].tolist() == [[[0, 2, 4, 5]]]
    slow = build("keydiff", 4)
    slow.look([dict(enumerate(KEYS))])
    assert slow.scores(0, range(6), None) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("policy", ["keydiff", "knorm"])
@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), heads=st.integers(1, 3), slots=st.integers(2, 12))
def test_scores_equal_the_slow_twin_in_any_order_of_slots(policy, seed, heads, slots):
    source = torch.Generator().manual_seed(seed)
    keys = torch.randn(heads, slots, 5, generator=source)
    places = torch.randperm(slots, generator=source)
    found = scores(policy, view_of(keys[:, places], positions=places))
    slow = build(policy, 1)
    slow.look([dict(enumerate(head.tolist())) for head in keys])
    for head in range(heads):
        expected = slow.scores(head, range(slots), None)
        ours = found[0, head, places.argsort()]
        near = {"atol": 1e-5, "rtol": 0} if policy == "keydiff" else {"atol": 0, "rtol": 4e-6}
        torch.testing.assert_close(ours, torch.tensor(expected), **near)


def test_an_empty_slot_is_no_part_of_the_anchor():
    keys = torch.tensor(KEYS).float()[None]
    places = torch.tensor([0, 1, 2, -1, 4, 5])
    held = torch.tensor([[[5]]])
    found = scores("keydiff", view_of(keys, positions=places, held=held))[0, 0]
    stored = places >= 0
    alone = scores("keydiff", view_of(keys[:, stored]))[0, 0]
    torch.testing.assert_close(found[stored], alone)


@pytest.mark.parametrize("policy", ["keydiff", "knorm"])
def test_layers_in_one_view_are_scored_one_by_one(policy):
    source = torch.Generator().manual_seed(1)
    layers = [torch.randn(2, 7, 4, generator=source) for _ in range(3)]
    found = scores(policy, view_of(*layers))
    alone = [scores(policy, view_of(layer)) for layer in layers]
    near = {} if policy == "keydiff" else {"atol": 0, "rtol": 0}
    torch.testing.assert_close(found, torch.cat(alone), **near)


def test_the_length_of_a_key_says_nothing():
    source = torch.Generator().manual_seed(2)
    keys = torch.randn(1, 1, 9, 4, generator=source)
    longer = keys * torch.rand(1, 1, 9, 1, generator=source).add(0.1)
    torch.testing.assert_close(
        distances_from_anchors([keys], None), distances_from_anchors([longer], None)
    )


@pytest.mark.parametrize("base", ["keydiff", "knorm"])
def test_sinks_and_recent_stay(base):
    policy = parse_policy(f"{base}(sinks=2,recent=3)")
    view = view_of(torch.randn(1, 9, 4))
    mask = policy.ranking.protected({}, view, 2)
    assert mask[0, 0].nonzero()[:, 0].tolist() == [0, 1, 6, 7, 8]
    assert parse_policy(base).ranking.protected({}, view, 2) is None
    with pytest.raises(UsageError, match="budget 5 is not above sinks 2 \\+ recent 3 = 5"):
        policy.check_budget(5)


@pytest.mark.parametrize("modifier", ["caote", "fastcaote", "quest"])
def test_what_makes_no_sense_is_refused(modifier):
    with pytest.raises(UsageError):
        parse_policy(f"keydiff+{modifier}")


@pytest.mark.parametrize("setting", ["sinks=-1", "recent=-1", "window=3"])
def test_settings_that_mean_nothing_are_refused(setting):
    with pytest.raises(UsageError):
        kvtool.parse_policy(f"keydiff({setting})")
