"""PyramidInfer's schedule: the authors' numbers, and any mean, exactly."""

import math

import pytest

from kvtool.policies.allocate.problem import AllocationProblem
from kvtool.policies.scores.pyramidinfer import Cosine, kept_tokens


def split(n, layers, mean, min_context=64):
    problem = AllocationProblem(
        total=mean * layers, min_budgets=[7] * layers, max_budgets=[n] * layers
    )
    return Cosine(recent_ratio=0.2, min_context=min_context).split(problem).tokens


def test_the_worked_examples():
    kept = kept_tokens(1000, 8, 0.9)
    assert kept == [1000, 1000, 996, 984, 959, 921, 871, 813]
    assert sum(kept) / 8000 == 0.943
    kept = kept_tokens(4096, 32, 0.9)
    assert [kept[layer] for layer in (0, 8, 16, 31)] == [4096, 3985, 3313, 1541]
    assert sum(kept) / 32 / 4096 == pytest.approx(0.7658, abs=1e-4)


def test_the_authors_mean_gives_the_authors_layers():
    assert split(1000, 8, 943) == kept_tokens(1000, 8, 0.9)


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9, 1.0])
def test_the_schedule_is_the_plain_loop(decay):
    for n, layers in [(1000, 8), (300, 3), (64, 5), (4096, 32), (7, 1)]:
        assert kept_tokens(n, layers, decay) == looped(n, layers, decay)


def looped(n, layers, decay):
    recent, context, expected = int(0.2 * n) + 1, n - int(0.2 * n) - 1, []
    for layer in range(layers):
        expected.append(recent + context)
        rise = (math.cos(math.pi * layer / layers) + 1) / 2
        after = int(context * ((1 - decay) * rise + decay) + 1e-9)
        context = after if after >= 64 else min(context, 64)
    return expected


@pytest.mark.parametrize(("n", "layers"), [(60, 2), (1000, 32), (5000, 1), (5000, 4)])
def test_every_mean_is_spent_exactly_and_no_layer_has_more_than_the_one_above(n, layers):
    for mean in {7, 20, 59, n // 3, n // 2, n - 1}:
        for least in (0, 64):
            tokens = split(n, layers, mean, least)
            assert sum(tokens) == mean * layers
            assert tokens == sorted(tokens, reverse=True)
            assert 7 <= tokens[-1] <= tokens[0] <= n


def test_a_mean_above_what_the_steepest_schedule_takes_keeps_the_first_layer_whole():
    least = math.ceil(sum(kept_tokens(1000, 8, 0.0)) / 8)
    assert split(1000, 8, least)[0] == 1000
    assert split(1000, 8, least - 20)[0] < 1000
    assert split(1000, 8, 60) == [60] * 8  # a prompt of 60 tokens has nothing above 64 to lose
