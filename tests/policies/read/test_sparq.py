import itertools

import pytest
import torch

import kvtool
from kvtool.maths.estimates import heaviest_channels, partial_scale, take_channels
from kvtool.policies.read.sparq import SparQ
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
    tensor,
)
from tests.reference import readers


def test_the_worked_example():
    query = tensor(QUERIES[:1])
    used = heaviest_channels(query, 2)
    assert used[0, 0].tolist() == [0, 2]
    part = take_channels(query, used)
    tau = 1 / partial_scale(query, part, 4**-0.5)
    torch.testing.assert_close(tau.flatten(), torch.tensor([1.825742]))
    reader = SparQ(r=2, k=2)
    choice = reader.choose(make_view(reader, QUERIES[:1], KEYS, VALUES))
    assert sorted(choice.slots[0, 0].tolist()) == [0, 3]
    torch.testing.assert_close(choice.weight[0, 0], torch.tensor([0.953388]))
    torch.testing.assert_close(choice.rest[0, 0], torch.tensor([1.5, 0.5]))
    out = read(reader, QUERIES[:1], KEYS, VALUES)
    torch.testing.assert_close(out, torch.tensor([[1.614455, -0.272268]]))
    plain = read(SparQ(r=2, k=2, reallocate=False), QUERIES[:1], KEYS, VALUES)
    torch.testing.assert_close(plain, torch.tensor([[1.620051, -0.310026]]))
    twin = readers.SparQ(2, 2).read(QUERIES[:1], KEYS, VALUES, 0.5)
    torch.testing.assert_close(torch.tensor(twin), out)


@pytest.mark.parametrize("local", [0, 3])
def test_equals_the_slow_twin(local):
    for seed, r in itertools.product(range(6), (1, 3, 8)):
        case = random_case(seed)
        twin = readers.SparQ(r, 9, local)
        assert chosen(SparQ(r, 9, local), *case) == [sorted(x) for x in twin.chosen(*case[:2])]
        ours = read(SparQ(r, 9, local), *case)
        torch.testing.assert_close(ours, torch.tensor(twin.read(*case, 8**-0.5)))


def test_a_group_averages_after_the_softmax():
    """Logits [8, 0], [0, 3], [0, 3]: their sum favours token 0, the mean softmax [.365, .635] 1."""
    scale = 2.0  # undoes 1 / sqrt(D) of the four channels, of which two are used in full
    queries = [[8 * scale, 0.0, 0, 0], [0.0, 3 * scale, 0, 0], [0.0, 3 * scale, 0, 0]]
    keys = [[1.0, 0, 0, 0], [0, 1.0, 0, 0]]
    view = make_view(SparQ(r=4, k=1), queries, keys, keys)
    assert SparQ(r=4, k=1).choose(view).slots.tolist() == [[[1]]]
    weights = (view.query @ view.keys.transpose(2, 3) / 2).softmax(-1).mean(2)
    torch.testing.assert_close(weights[0, 0], torch.tensor([0.3648, 0.6352]), atol=5e-5, rtol=0)


@pytest.mark.parametrize("start", [1, 9])
def test_tables_grow_as_if_made_anew(start):
    same_tables(SparQ(3, 4), random_case(start), start)


def test_a_query_of_zeros_is_no_nan():
    _, keys, values = random_case(0)
    assert read(SparQ(2, 4), [[0.0] * 8], keys, values).isfinite().all()


def test_sizes_follow_from_the_budget():
    assert SparQ().sized(StepBudget(512, 4096, 128)) == SparQ(r=16, k=256)
    # r = 128 * 256 / 131072 rounds to 0
    assert SparQ().sized(StepBudget(256, 131072, 128)) == SparQ(r=1, k=128)
    assert SparQ().sized(StepBudget(4096, 1000, 128)).r == 128


def test_refusals():
    with pytest.raises(kvtool.UsageError, match="sparq: local 5 is above k 4"):
        kvtool.parse_policy("sparq(k=4,local=5)")
