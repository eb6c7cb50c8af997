"""Knorm: scores and choice against the worked example and the slow twin."""

import pytest
import torch

import kvtool
from kvtool import parse_policy
from kvtool.errors import UsageError
from kvtool.generation import prefill
from kvtool.maths.selection import keep_top
from kvtool.policies.scores.knorm import key_lengths
from tests.models_for_tests import peaky_model
from tests.policies.test_keydiff import KEYS, scores, view_of
from tests.reference.policies import build


def test_worked_scores_and_the_three_that_tie():
    keys = torch.tensor(KEYS).float()[None]
    expected = [-1, -1.414214, -1.414214, -2, -1.414214, -2]
    found = scores("knorm", view_of(keys))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[0, 0], torch.tensor(expected), atol=1e-6, rtol=0)
    positions = torch.arange(6, dtype=torch.int32).expand(1, 1, 6)
    assert keep_top(found, positions, 3, None, 3)[1].tolist() == [[[0, 1, 2]]]
    slow = build("knorm", 3)
    slow.look([dict(enumerate(KEYS))])
    assert slow.scores(0, range(6), None) == pytest.approx(expected, abs=1e-6)


def test_keys_of_half_precision_are_measured_in_float32():
    keys = torch.full((1, 1, 1, 300), 1.0, dtype=torch.bfloat16)
    assert key_lengths((keys,)).item() == pytest.approx(300**0.5, rel=1e-6)


def test_lengths_that_differ_by_rounding_alone_tie():
    source = torch.Generator().manual_seed(3)
    keys = torch.randn(1, 1, 1, 64, generator=source).expand(1, 1, 500, 64)
    angles = torch.rand(500, 32, generator=source) * 1000
    one, two = keys[..., :32], keys[..., 32:]
    turned = torch.cat(
        [one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()], -1
    )
    assert len(turned.norm(dim=-1).unique()) > 1
    assert len(key_lengths((turned,)).unique()) == 1


def test_of_equal_tokens_the_first_layer_keeps_the_first_ones():
    model = kvtool.attach(peaky_model("llama", num_hidden_layers=1))
    cache = kvtool.build_cache(model, "knorm", 10)
    prefill(model, cache, torch.tensor([[7] * 40]))
    assert (
        cache.kept_positions(0)[0].tolist() == [list(range(10))] * cache.kept_positions(0).shape[1]
    )


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("knorm+caote", "`caote` weighs values by attention scores, and `knorm` has none"),
        ("knorm+fastcaote", "`fastcaote` weighs values by attention scores, and `knorm` has none"),
        ("knorm+chunk", "`knorm` does not cut a prompt so"),
        ("knorm(sinks=-1)", "knorm: sinks must be 0 or more, got -1"),
        ("knorm(recent=-1)", "knorm: recent must be 0 or more, got -1"),
        ("knorm(window=3)", "window"),
    ],
)
def test_what_makes_no_sense_is_refused(policy, why):
    with pytest.raises(UsageError, match=why):
        parse_policy(policy)
