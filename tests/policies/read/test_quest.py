import itertools

import pytest
import torch

import kvtool
from kvtool.policies.read.quest import Quest
from kvtool.policies.read.view import StepBudget
from tests.policies.read.trial import (
    KEYS,
    QUERIES,
    VALUES,
    chosen,
    make_view,
    random_case,
    same_tables,
)
from tests.reference import readers


def test_the_worked_example():
    # bounds by head [4.6, 3.1] and [1.5, 2.7], their sum [6.1, 5.8]
    twin = readers.Quest(page=2, k=2)
    pages = [KEYS[:2], KEYS[2:]]
    bounds = [[twin.bound(query, page) for page in pages] for query in QUERIES]
    torch.testing.assert_close(torch.tensor(bounds), torch.tensor([[4.6, 3.1], [1.5, 2.7]]))
    torch.testing.assert_close(torch.tensor(twin.scores(QUERIES, KEYS)), torch.tensor([6.1, 5.8]))
    view = make_view(Quest(2, 2), QUERIES, KEYS, VALUES)
    query = torch.cat([view.query.clamp(min=0), view.query.clamp(max=0)], -1)
    ours = (query @ view.tables["bounds"])[0, 0]
    torch.testing.assert_close(ours, torch.tensor([[4.6, 3.1], [1.5, 2.7]]))


@pytest.mark.parametrize("page", [1, 3, 4, 5])
def test_equals_the_slow_twin(page):
    for seed, k in itertools.product(range(6), (3, 17, 40)):
        case = random_case(seed, grain=2 if seed % 2 else None)
        expected = [sorted(row) for row in readers.Quest(page, k).chosen(*case[:2])]
        assert chosen(Quest(page, k), *case) == expected


def test_the_last_page_is_read_and_at_least_three_are():
    keys = [[9.0]] * 8 + [[1.0]] * 6 + [[-9.0]]
    assert chosen(Quest(4, 1), [[1.0]], keys, keys) == [[0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14]]


def test_equal_pages_go_to_the_lower_position():
    keys = [[1.0]] * 22
    assert chosen(Quest(4, 12), [[1.0]], keys, keys) == [[*range(8), 20, 21]]


@pytest.mark.parametrize("page", [1, 3, 8])
def test_tables_grow_as_if_made_anew(page):
    for start in (1, 4, 7):
        same_tables(Quest(page, 4), random_case(start), start)


def test_sizes_follow_from_the_budget():
    # half of t pairs are bounds: 2 S / t tokens a page, rounded up
    assert Quest().sized(StepBudget(256, 131072, 128)) == Quest(page=1024, k=128)
    assert Quest().sized(StepBudget(512, 32768, 128)) == Quest(page=128, k=256)
    assert Quest().sized(StepBudget(512, 100, 128)) == Quest(page=1, k=256)
    assert Quest().sized(StepBudget(512, 1000, 128)) == Quest(page=4, k=256)  # rounded up
    assert Quest(page=16).sized(StepBudget(512, 32768, 128)) == Quest(page=16, k=256)


def test_refusals():
    with pytest.raises(kvtool.UsageError, match="quest: page must be 1 or more, got 0"):
        kvtool.parse_policy("quest(page=0)")
