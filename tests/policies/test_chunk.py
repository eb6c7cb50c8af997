"""ChunkKV: runs against the worked example and the slow twin, and a model against the oracle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool import parse_policy
from kvtool.errors import UsageError
from kvtool.maths.selection import keep_top
from kvtool.policies.chunk import Chunk, run_order
from kvtool.policies.parts import SlotView
from tests.cache.test_oracle import follow
from tests.models_for_tests import anchored_model, prompt
from tests.reference.policies import Chunked, SnapKV, build


def ours(scores, budget, length, forced=(), positions=None):
    """The slots kept of `scores[head][slot]`, by head."""
    scores = torch.tensor(scores, dtype=torch.float32)[None]
    heads, slots = scores.shape[1:]
    places = torch.arange(slots) if positions is None else torch.tensor(positions)
    places = places.to(torch.int32).expand(1, heads, slots)
    view = SlotView((torch.zeros(1, heads, slots, 1),), places, slots, budget, slots)
    mask = torch.isin(places, torch.tensor(list(forced), dtype=torch.int32)) if forced else None
    order = Chunk(length).order(scores, view, mask).expand_as(scores)
    return keep_top(order, places, budget, mask, budget)[1][0].tolist()


def theirs(scores, budget, length, forced=()):
    """The same by the slow twin."""
    summed = {p: sum(head[p] for head in scores) for p in range(len(scores[0]))}
    return sorted(Chunked(SnapKV(budget), length).best(summed, list(forced)))


def test_worked_runs_fill_the_budget_exactly():
    # runs .233333, .1, .3: 6 first, then 0 1 2, and of the second run its best token
    scores = [[0.1, 0.4, 0.2, 0.2, 0.05, 0.05, 0.3]]
    assert ours(scores, 5, 3) == [[0, 1, 2, 3, 6]]
    assert theirs(scores, 5, 3) == [0, 1, 2, 3, 6]
    order = run_order(
        *(t[None] for t in (torch.tensor(scores[0]), torch.arange(7))), torch.ones(1, 7).bool(), 3
    )
    assert order.argsort().tolist() == [[6, 1, 2, 0, 3, 4, 5]]


def test_worked_runs_of_two_heads_are_summed():
    # runs of two: (1 + 0 + 0 + 0) / 2, (0 + 0 + .8 + .6) / 2, so both heads keep 2 and 3
    assert ours([[1.0, 0, 0, 0], [0, 0, 0.8, 0.6]], 2, 2) == [[2, 3], [2, 3]]


def test_a_protected_token_belongs_to_no_run():
    # without 1 the first run is .1 and .1, below the second one
    scores = [[0.1, 9.0, 0.1, 0.2, 0.2, 0.1]]
    assert ours(scores, 3, 3, forced=[1]) == [[1, 3, 4]]
    assert theirs(scores, 3, 3, forced=[1]) == [1, 3, 4]


def test_ties_go_to_the_lower_position():
    assert ours([[0.5] * 9], 4, 3) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("last", [-1, 0, 1])
def test_runs_of_equal_scores_tie_whatever_their_lengths(last):
    """A mean of equal scores is that score, to the last bit: entries of a batch keep the same."""
    score = torch.tensor(1.9351680278778076).view(torch.int32).add_(last).view(torch.float32)
    for short in range(1, 20):
        scores = score.expand(1, 20 + short)
        kept = run_order(scores, torch.arange(20 + short)[None], scores > 0, 20).argsort()
        assert kept.tolist() == [list(range(20 + short))]


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(2, 30), st.integers(1, 9), st.data())
def test_what_is_kept_equals_the_slow_twin_in_any_order_of_slots(seed, heads, slots, length, data):
    source = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 6, (heads, slots), generator=source) / 4  # with ties
    places = torch.randperm(slots, generator=source)
    budget = data.draw(st.integers(1, slots))
    forced = data.draw(st.lists(st.integers(0, slots - 1), max_size=budget - 1, unique=True))
    found = ours(scores[:, places].tolist(), budget, length, forced, places.tolist())
    assert found == [theirs(scores.tolist(), budget, length, forced)] * heads


def test_empty_slots_belong_to_no_run():
    scores = torch.tensor([[5.0, 0.1, 0.2, 5.0, 0.3]])
    places = torch.tensor([[-1, 0, 1, -1, 2]])
    order = run_order(scores, places, places >= 0, 2)
    assert order[0, [4, 2, 1]].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("mode", "budget"), [("full", 24), ("block:20", 40)])
def test_kept_positions_and_logits_equal_the_oracle(mode, budget):
    follow(
        anchored_model("llama"),
        lambda: build("snapkv", budget, "chunk", window=6),
        "snapkv(window=6)+chunk",
        budget,
        mode,
        prompt(70),
    )


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("h2o+chunk", "`h2o` does not cut a prompt so"),
        ("keydiff+chunk", "`keydiff` does not cut a prompt so"),
        ("pyramidinfer+chunk", "`pyramidinfer` does not cut a prompt so"),
        ("full+chunk", "`full` does not cut a prompt so"),
        ("quest+chunk", "`chunk` has nothing to do there"),
        ("rocketkv+chunk", "`chunk` has no part in it"),
        ("snapkv+ada+chunk", "and `ada` lets them differ"),
        ("adakv+chunk", "and `adakv` lets them differ"),
        ("snapkv+chunk(length=0)", "length must be 1 or more, got 0"),
        ("snapkv+chunk+chunk", "`chunk` is given twice"),
    ],
)
def test_what_makes_no_sense_is_refused(policy, told):
    with pytest.raises(UsageError, match=told):
        parse_policy(policy)


def test_a_run_longer_than_the_budget_is_refused():
    policy = parse_policy("snapkv(window=8)+chunk(length=40)")
    with pytest.raises(UsageError, match="budget 32 is below a run of 40 tokens of `chunk`"):
        policy.check_budget(32)
    policy.check_budget(40)
    assert policy.min_budget == 40
