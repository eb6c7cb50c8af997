import itertools
import math

import pytest
import torch

from kvtool.maths.estimates import moments, principal_components
from kvtool.policies.read.loki import Loki
from kvtool.policies.read.view import StepBudget
from tests.policies.read.trial import chosen, make_view, random_case, same_tables
from tests.reference import readers

ROOT = math.sqrt(0.5)
ROTATION = [[ROOT, -ROOT], [ROOT, ROOT]]


def rotate(rows):
    return (torch.tensor(rows) @ torch.tensor(ROTATION).T).tolist()


def test_the_worked_example():
    keys, queries = [[2.0, 0.0], [1, 1], [0, 2], [-1, 0.5]], [[1.0, 0.2]]
    basis = torch.tensor(ROTATION)[None]  # its columns undo the rotation of keys and query
    reader = Loki(d=1, k=2)
    view = make_view(reader, rotate(queries), rotate(keys), keys, basis)
    part = view.query @ view.tables["basis"]
    approximate = (part @ view.tables["components"] * view.scale)[0, 0, 0]
    expected = torch.tensor([1.414214, 0.707107, 0, -0.707107])
    torch.testing.assert_close(approximate, expected, atol=1e-6, rtol=1e-5)
    exact = (view.query @ view.keys.transpose(2, 3) * view.scale)[0, 0, 0]
    torch.testing.assert_close(exact, torch.tensor([1.414214, 0.848528, 0.282843, -0.636396]))
    assert reader.choose(view).slots[0, 0].tolist() == [0, 1]


@pytest.mark.parametrize("scope", ["group", "query_head"])
def test_equals_the_slow_twin(scope):
    for seed, d in itertools.product(range(6), (1, 3, 8)):
        case = random_case(seed)
        basis = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))).Q
        twin = readers.Loki(basis.T[:d].tolist(), 9, scope)
        expected = [sorted(row) for row in twin.chosen(*case[:2])]
        assert chosen(Loki(d, 9, scope=scope), *case, basis=basis[None]) == expected


def test_all_components_are_exact():
    case = random_case(3)
    assert chosen(Loki(8, 9), *case) == [
        sorted(row) for row in readers.ExactTopK(9, "group").chosen(*case[:2])
    ]


def test_the_basis_is_that_of_the_prompts_keys():
    _, keys, values = random_case(1)
    reader = Loki(d=2, k=4)
    same_tables(reader, (None, keys, values), start=20)
    basis = make_view(reader, [[0.0] * 8], keys, values).tables["basis"][0, 0]
    torch.testing.assert_close(basis.T @ basis, torch.eye(2), atol=1e-5, rtol=0)
    # no direction explains more variance than the first, none more of the rest than the second
    centred = torch.tensor(keys) - torch.tensor(keys).mean(0)
    spread = torch.linalg.svd(centred).S
    torch.testing.assert_close((centred @ basis).norm(dim=0), spread[:2])


def test_components_of_many_heads_at_a_time():
    keys = torch.randn(2, 3, 50, 8, generator=torch.Generator().manual_seed(0))
    variances, together = principal_components(moments(keys))
    alone = principal_components(moments(keys[1, 2]))[1]
    torch.testing.assert_close(together[1, 2].abs(), alone.abs(), atol=1e-4, rtol=1e-4)
    spread = torch.linalg.svd(keys[1, 2] - keys[1, 2].mean(0)).S.square() / 50
    torch.testing.assert_close(variances[1, 2], spread)


def test_sizes_follow_from_the_budget():
    assert Loki().sized(StepBudget(512, 4096, 128)) == Loki(d=16, k=256)
    assert Loki().sized(StepBudget(256, 131072, 128)) == Loki(d=1, k=128)
