import itertools
from types import SimpleNamespace

import pytest
import torch

import kvtool
from kvtool.maths.estimates import heaviest_channels, partial_scale, take_channels
from kvtool.planning.rocketkv_stages import plan_rocketkv
from kvtool.policies.read.exact_topk import ExactTopK
from kvtool.policies.read.hsa import HSA
from kvtool.policies.read.view import StepBudget
from tests.policies.read.trial import (
    KEYS,
    QUERIES,
    VALUES,
    chosen,
    make_view,
    random_case,
    read,
    same_tables,
)
from tests.reference import readers


def test_the_worked_example():
    reader = HSA(page=2, k1=2, k=2)
    view = make_view(reader, QUERIES, KEYS, VALUES)
    upper, lower = view.tables["bounds"][0, 0].split(4)
    assert upper.T.tolist() == [[1, 1, 2, 0], [1, 1, 1, 3]]
    assert lower.T.tolist() == [[0, 0, -1, -1], [-2, -1, 0, 0]]
    used = heaviest_channels(view.query, 2)
    assert used[0, 0].tolist() == [0, 2]
    tau = 1 / partial_scale(view.query, take_channels(view.query, used), 0.5)
    torch.testing.assert_close(tau.flatten(), torch.tensor([1.825742, 1.651446]))
    twin = readers.HSA(2, 2, 2)
    share = readers.mean(twin.estimates(QUERIES, KEYS))
    expected = torch.tensor([0.264622, 0.264622, 0.235378, 0.235378])
    torch.testing.assert_close(torch.tensor(share), expected, atol=1e-6, rtol=1e-5)
    assert chosen(reader, QUERIES, KEYS, VALUES) == [[0, 1]] * 2
    out = torch.tensor([[0.937027, 0.062973], [0.401312, 0.598688]])
    torch.testing.assert_close(read(reader, QUERIES, KEYS, VALUES), out)
    torch.testing.assert_close(torch.tensor(twin.read(QUERIES, KEYS, VALUES, 0.5)), out)


@pytest.mark.parametrize("page", [1, 2, 3, 5])
def test_equals_the_slow_twin(page):
    for seed, (k1, k) in itertools.product(range(6), ((2, 7), (5, 10), (8, 36))):
        case = random_case(seed)
        expected = [sorted(row) for row in readers.HSA(page, k1, k).chosen(*case[:2])]
        assert chosen(HSA(page, k1, k), *case) == expected


def test_all_channels_and_pages_of_one_token_are_the_oracle_of_a_group():
    for seed in range(6):
        case = random_case(seed)
        assert chosen(HSA(page=1, k1=8, k=9), *case) == chosen(ExactTopK("group", k=9), *case)


def test_a_page_larger_than_the_text_is_the_text():
    case = random_case(3)
    for page in (1000, 2**31 - 1):
        rows = chosen(HSA(page=page, k1=4, k=7), *case)
        assert rows == [list(range(7))] * len(rows)


def test_a_page_is_taken_in_part_from_its_first_token_on():
    keys = [[0.0]] * 3 + [[1.0]] * 3 + [[2.0]]
    assert chosen(HSA(3, 1, 3), [[1.0]], keys, keys) == [[3, 4, 6]]
    assert chosen(HSA(3, 1, 6), [[1.0]], keys, keys) == [[0, 1, 3, 4, 5, 6]]
    assert chosen(HSA(3, 1, 3), [[1.0]], keys[:6], keys) == [[3, 4, 5]]


def test_a_channel_of_sum_zero_takes_the_upper_bound():
    """Upper bounds 1 and .9: the mean of sigmoid(.2), sigmoid(-.1) twice is below a half.

    Lower bounds, -1 and .9, would choose the first page: sigmoid(-3.8), sigmoid(1.9) twice.
    """
    keys, queries = [[-1.0], [1.0], [0.9], [0.9]], [[2.0], [-1.0], [-1.0]]
    assert chosen(HSA(2, 1, 2), queries, keys, keys) == [[2, 3]] * 3


@pytest.mark.parametrize("page", [1, 2, 5])
def test_tables_grow_as_if_made_anew(page):
    for start in (1, 5, 6):
        same_tables(HSA(page, 2, 4), random_case(start), start)


def test_sizes_follow_from_the_plan():
    plan = plan_rocketkv(32768, 512, 128)
    assert HSA().sized(StepBudget(512, 3191, 128, plan)) == HSA(page=3, k1=61, k=256)
    # alone: nothing is cut, c2 = 32768 / 512 = 64, pages of 8, 128 * 8 / 64 channels
    plan = plan_rocketkv(32768, 512, 128, split=0.0)
    assert HSA().sized(StepBudget(512, 32768, 128, plan)) == HSA(page=8, k1=16, k=256)
    own = SimpleNamespace(page_size=9, head_dims=9, top_k=9)
    assert HSA(2, 3, 4).sized(StepBudget(512, 100, 8, own)) == HSA(2, 3, 4)


def test_refusals():
    with pytest.raises(kvtool.UsageError, match="hsa: k1 must be 1 or more, got 0"):
        kvtool.parse_policy("hsa(k1=0)")
