"""Heads that compete for the budget of their layer, against lists and loops."""

import random
from fractions import Fraction

import pytest
import torch

from kvtool.errors import UsageError
from kvtool.policies.allocate.ada import Ada, _apportion, split_heads
from kvtool.policies.allocate.problem import AllocationProblem
from kvtool.policies.spelling import check_numbers
from tests.reference.ada import apportion

SCORES = [[0.6, 0.3, 0.25, 0.2, 0.02, 0.01], [0.1, 0.05, 0.04, 0.03, 0.02, 0.01]]


def slow_counts(scores, total, among):
    """How many of the best entries of all heads fall in each head."""
    entries = [
        (-score, place, head)
        for head, row in enumerate(scores)
        for place, score in enumerate(row)
        if among[head][place]
    ]
    best = sorted(entries)[:total]
    return [sum(entry[2] == head for entry in best) for head in range(len(scores))]


def slow_mix(scores, total, share, among):
    share, mean = Fraction(str(share)), Fraction(total, len(scores))
    counts = slow_counts(scores, total, among)
    mixed = [(1 - share) * count + share * mean for count in counts]
    return apportion(mixed, total, [sum(row) for row in among])


def slow_force(scores, total, share, among):
    sure = int(total // len(scores) * Fraction(str(share)))
    counts, rest = [], []
    for head, row in enumerate(scores):
        own = sorted((-score, place) for place, score in enumerate(row) if among[head][place])
        counts.append(min(sure, len(own)))
        rest += [(*entry, head) for entry in own[sure:]]
    for _, _, head in sorted(rest)[: total - sum(counts)]:
        counts[head] += 1
    return counts


def test_the_worked_example():
    scores = torch.tensor([SCORES])
    assert split_heads(scores, 6, floor=0.0).tolist() == [[4, 2]]
    assert split_heads(scores, 6, floor=0.2).tolist() == [[4, 2]]  # from 3.8 and 2.2
    assert split_heads(scores, 6, floor=0.5).tolist() == [[4, 2]]  # from 3.5 and 2.5
    assert split_heads(scores, 6, floor=1.0).tolist() == [[3, 3]]


@pytest.mark.parametrize("safeguard", ["mix", "force"])
def test_counts_against_loops(safeguard):
    rng = random.Random(0)
    slow = {"mix": slow_mix, "force": slow_force}[safeguard]
    for _ in range(120):
        batch, heads, n = rng.randint(1, 3), rng.randint(1, 5), rng.randint(1, 40)
        values = [0.0, 0.25, 0.5, 1.0] if rng.random() < 0.5 else [rng.random() for _ in range(99)]
        scores = [
            [[rng.choice(values) for _ in range(n)] for _ in range(heads)] for _ in "a" * batch
        ]
        dense = rng.choice([0.9, 0.4])  # heads offer few entries, some none
        among = [[rng.random() < dense for _ in range(n)] for _ in range(heads)]
        offered = [sum(row) for row in among]
        if sum(offered) == 0:
            continue
        total = rng.randint(1, sum(offered))
        share = rng.choice([0.0, 0.2, 0.35, 0.5, 0.123, 1 / 3, 1.0])
        got = split_heads(
            torch.tensor(scores),
            total,
            floor=share,
            safeguard=safeguard,
            among=torch.tensor(among).expand(batch, -1, -1),
        )
        exact = "1/3" if share == 1 / 3 else share
        assert got.tolist() == [slow(row, total, exact, among) for row in scores]
        assert got.sum(-1).tolist() == [total] * batch
        assert (got <= torch.tensor(offered)).all()


def test_equal_remainders_go_to_the_lower_head():
    """Of 8, 31.2, 18.4 and 38.4 the third is rounded up, whatever floats make of .4."""
    counts = [4, 33, 17, 42]
    scores = torch.zeros(1, 4, 50)
    for head, count in enumerate(counts):
        scores[0, head, :count] = 1.0
    assert split_heads(scores, 96, floor=0.0).tolist() == [counts]
    assert split_heads(scores, 96, floor=0.2).tolist() == [[8, 31, 19, 38]]


def test_what_a_head_cannot_fill_goes_to_the_others():
    """Head 0 offers 2 of its share of 20 * .5 + .5 * 10; the others share 38 of 40."""
    among = torch.zeros(1, 4, 30, dtype=torch.bool)
    for head, offered in enumerate([2, 30, 30, 30]):
        among[0, head, :offered] = True
    scores = torch.zeros(1, 4, 30)
    scores[0, 1, :25] = 1.0  # all heads tie for what this one leaves: 2, 25, 7, 6
    counts = split_heads(scores, 40, floor=0.5, among=among)
    # mixed 6, 17.5, 8.5, 8; the rest of 38 in proportion: 19.56, 9.5, 8.94
    assert counts.tolist() == [[2, 20, 9, 9]]


def test_more_than_all_offer_is_all_that_they_offer():
    among = torch.tensor([[[True, False], [True, True]]])
    assert split_heads(torch.zeros(1, 2, 2), 9, among=among).tolist() == [[1, 2]]


def test_shares_of_a_million_tokens_stay_whole_numbers():
    wishes = torch.tensor([[10**12, 3 * 10**12, 2 * 10**12]])
    limits = torch.tensor([[10**6] * 3])
    assert _apportion(wishes, torch.tensor([[600_000]]), limits).tolist() == [
        [100_000, 300_000, 200_000]
    ]


def test_each_row_has_its_own_budget():
    scores = torch.tensor([SCORES, SCORES])
    counts = split_heads(scores, torch.tensor([[6], [10]]))
    assert counts[0].tolist() == split_heads(scores[:1], 6)[0].tolist()
    assert counts[1].tolist() == split_heads(scores[1:], 10)[0].tolist()
    assert counts.sum(-1).tolist() == [6, 10]


def test_forced_entries_come_before_infinite_scores_of_other_heads():
    scores = torch.full((1, 2, 6), float("inf"))
    scores[0, 1] = -1.0
    counts = split_heads(scores, 6, floor=0.7, safeguard="force")
    assert counts.tolist() == [[4, 2]]


def test_normalising_weighs_heads_by_what_their_best_hold():
    # head 0 spreads evenly (its best 2 hold half), head 1 is peaked (its best 2 hold nearly all)
    scores = torch.tensor([[[1.0, 1.0, 1.0, 1.0], [0.9, 0.6, 0.0, 0.0]]])
    assert split_heads(scores, 4, floor=0.0).tolist() == [[4, 0]]
    assert split_heads(scores, 4, floor=0.0, normalise=True).tolist() == [[2, 2]]
    nothing = torch.zeros(1, 2, 4)
    assert split_heads(nothing, 4, normalise=True).tolist() == [[2, 2]]


def test_layers_are_treated_alike():
    problem = AllocationProblem(total=10, min_budgets=[1] * 3, max_budgets=[9] * 3)
    assert Ada().split(problem).tokens == [4, 3, 3]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_means_nothing_is_refused(share):
    with pytest.raises(UsageError, match="share must be"):
        check_numbers(Ada(share=share))
