"""Heads that compete for the budget of their layer, against lists and loops."""

import random

import pytest
import torch

from kvtool.errors import UsageError
from kvtool.policies.allocate.ada import Ada, split_heads
from kvtool.policies.allocate.room import Room

SCORES = [[0.6, 0.3, 0.25, 0.2, 0.02, 0.01], [0.1, 0.05, 0.04, 0.03, 0.02, 0.01]]


def slow_counts(scores, base, among):
    """How many of the best entries of all heads fall in each head."""
    entries = [
        (-score, place, head)
        for head, row in enumerate(scores)
        for place, score in enumerate(row)
        if among[head][place]
    ]
    best = sorted(entries)[: base * len(scores)]
    return [sum(entry[2] == head for entry in best) for head in range(len(scores))]


def slow_mix(scores, base, share, among):
    counts = slow_counts(scores, base, among)
    mixed = [(1 - share) * count + share * base for count in counts]
    floors = [int(x + 1e-9) for x in mixed]
    order = sorted(range(len(mixed)), key=lambda head: (floors[head] - mixed[head], head))
    for head in order[: base * len(scores) - sum(floors)]:
        floors[head] += 1
    return floors


def slow_force(scores, base, share, among):
    sure = int(base * share + 1e-9)
    counts, rest = [], []
    for head, row in enumerate(scores):
        own = sorted((-score, place) for place, score in enumerate(row) if among[head][place])
        counts.append(min(sure, len(own)))
        rest += [(*entry, head) for entry in own[sure:]]
    for _, _, head in sorted(rest)[: base * len(scores) - sum(counts)]:
        counts[head] += 1
    return counts


def test_the_worked_example():
    scores = torch.tensor([SCORES])
    assert split_heads(scores, 3, share=0.0).tolist() == [[4, 2]]
    assert split_heads(scores, 3, share=0.2).tolist() == [[4, 2]]  # from 3.8 and 2.2
    assert split_heads(scores, 3, share=0.5).tolist() == [[4, 2]]  # from 3.5 and 2.5
    assert split_heads(scores, 3, share=1.0).tolist() == [[3, 3]]


@pytest.mark.parametrize("safeguard", ["mix", "force"])
def test_counts_against_loops(safeguard):
    rng = random.Random(0)
    slow = {"mix": slow_mix, "force": slow_force}[safeguard]
    for _ in range(300):
        batch, heads, n = rng.randint(1, 3), rng.randint(1, 5), rng.randint(1, 40)
        values = [0.0, 0.25, 0.5, 1.0] if rng.random() < 0.5 else [rng.random() for _ in range(99)]
        scores = [
            [[rng.choice(values) for _ in range(n)] for _ in range(heads)] for _ in "a" * batch
        ]
        among = [[rng.random() < 0.9 for _ in range(n)] for _ in range(heads)]
        offered = min(sum(row) for row in among)
        if offered == 0:
            continue
        base, share = rng.randint(1, offered), rng.choice([0.0, 0.2, 0.35, 0.5, 1.0])
        got = split_heads(
            torch.tensor(scores),
            base,
            share=share,
            safeguard=safeguard,
            among=torch.tensor(among).expand(batch, -1, -1),
        )
        assert got.tolist() == [slow(row, base, share, among) for row in scores]
        assert got.sum(-1).tolist() == [heads * base] * batch
        assert (got <= torch.tensor(among).sum(-1)).all()


def test_each_row_has_its_own_budget():
    scores = torch.tensor([SCORES, SCORES])
    counts = split_heads(scores, torch.tensor([3, 5]).view(2, 1, 1))
    assert counts[0].tolist() == split_heads(scores[:1], 3)[0].tolist()
    assert counts[1].tolist() == split_heads(scores[1:], 5)[0].tolist()
    assert counts.sum(-1).tolist() == [6, 10]


def test_heads_of_equal_scores_share_alike():
    assert split_heads(torch.zeros(1, 4, 9), 3, share=0.0).tolist() == [[3, 3, 3, 3]]


def test_forced_entries_come_before_infinite_scores_of_other_heads():
    scores = torch.full((1, 2, 6), float("inf"))
    scores[0, 1] = -1.0
    counts = split_heads(scores, 3, share=0.7, safeguard="force")
    assert counts.tolist() == [[4, 2]]


def test_normalising_weighs_heads_by_what_their_best_hold():
    # head 0 spreads evenly (its best 2 hold half), head 1 is peaked (its best 2 hold nearly all)
    scores = torch.tensor([[[1.0, 1.0, 1.0, 1.0], [0.9, 0.6, 0.0, 0.0]]])
    assert split_heads(scores, 2, share=0.0).tolist() == [[4, 0]]
    assert split_heads(scores, 2, share=0.0, normalise=True).tolist() == [[2, 2]]
    nothing = torch.zeros(1, 2, 4)
    assert split_heads(nothing, 2, normalise=True).tolist() == [[2, 2]]


def test_a_whole_prompt_is_kept_whole():
    assert split_heads(torch.tensor([SCORES]), 6).tolist() == [[6, 6]]


def test_layers_are_treated_alike():
    room = Room(total=10, lo=[1] * 3, hi=[9] * 3)
    assert Ada().split(room).tokens == [4, 3, 3]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_means_nothing_is_refused(share):
    with pytest.raises(UsageError, match="share must be between 0 and 1"):
        Ada(share=share)
