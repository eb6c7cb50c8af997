"""Training resumes as if it had never stopped, and the optimiser does what it says."""

import functools

import pytest
import torch

import train
from kvtool.models.reference.filler import Filler
from training.muon import Muon, orthogonalise

one_filler = functools.cache(Filler)


@pytest.fixture(autouse=True)
def fillers_are_made_once(monkeypatch):
    monkeypatch.setattr("training.run.Filler", one_filler)


def options(out, *more):
    out.mkdir(exist_ok=True)
    small = ["--width", "16", "--layers", "1", "--heads", "2", "--kv-heads", "1"]
    return train._options(["--out", str(out), "--head-dim", "8", *small, *more])


@pytest.mark.exhaustive
def test_a_killed_run_goes_on_where_it_was_saved(tmp_path):
    whole = train.Run(options(tmp_path / "whole"))
    for _ in range(4):
        whole.step()

    first = train.Run(options(tmp_path / "killed"))
    for _ in range(2):
        first.step()
    first.save()
    first.step()  # lost: the kill comes before the next save
    second = train.Run(options(tmp_path / "killed"))
    assert second.progress["step"] == 2
    for _ in range(2):
        second.step()

    assert second.progress == whole.progress
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(7, 7), (2, 5, 11), (11, 5)])
def test_orthogonalise_brings_singular_values_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrix))
    assert values.min() > 0.3  # the quintic iteration hovers around one, 0.7 to 1.2 when settled
    assert values.max() < 1.3


def test_muon_descends_along_the_orthogonalised_gradient():
    weight = torch.zeros(5, 7, requires_grad=True)
    slope = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    optimiser = Muon([weight], lr=0.1)
    (weight * slope).sum().backward()
    optimiser.step()
    # first step: momentum is 0.05 g, its Nesterov look-ahead a positive multiple of g
    expected = -0.1 * 0.2 * 7**0.5 * orthogonalise(slope)
    torch.testing.assert_close(weight.detach(), expected, atol=1e-4, rtol=1e-3)
