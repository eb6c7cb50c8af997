import math

import pytest
import torch

import kvtool
from kvtool.profiling.calidrop import GRID, RecomputeFrequency, recompute_shares
from tests.models_for_tests import peaky_model, random_ids
from tests.profiling.watching import watch


def turning(degrees, steps):
    angle = torch.arange(steps + 1, dtype=torch.float64) * math.radians(degrees)
    return torch.stack([angle.cos(), angle.sin()], -1)


def test_an_even_turn_recomputes_at_its_own_rate():
    for degrees, every in [(3, 16), (5, 10), (6, 8), (8, 6), (10, 5), (15, 4)]:
        shares = recompute_shares(turning(degrees, 240), [(0.7, 0.85)])
        assert every == math.floor(math.acos(0.7) / math.radians(degrees)) + 1
        assert shares[0, 0].item() == pytest.approx(1 / every)


def test_six_degrees_calibrate_three_steps_of_four():
    recompute, calibrate = recompute_shares(turning(6, 240), [(0.7, 0.85)])[0].tolist()
    assert (recompute, calibrate, 1 - calibrate) == pytest.approx((1 / 8, 0.75, 0.25))


def test_thresholds_are_strict():
    held, at_low, at_high = [1.0, 0.0, 0.0], [0.5, 0.75**0.5, 0.0], [0.75, 0.4375**0.5, 0.0]
    queries = torch.tensor([held, at_low, at_high])
    low, high = (float(torch.nn.functional.normalize(queries, dim=-1)[i, 0]) for i in (1, 2))
    assert recompute_shares(queries, [(low, high)])[0].tolist() == [0.0, 0.0]


def replay_by_loops(queries, theta1, theta2):
    held, recomputed, calibrated = queries[0], 0, 0
    for query in queries[1:]:
        dot = sum(a * b for a, b in zip(held, query, strict=True))
        sizes = math.sqrt(sum(a * a for a in held)) * math.sqrt(sum(b * b for b in query))
        rho = dot / sizes
        if rho < theta1:
            held, recomputed, calibrated = query, recomputed + 1, calibrated + 1
        elif rho > theta2:
            calibrated += 1
    return recomputed / (len(queries) - 1), calibrated / (len(queries) - 1)


def test_random_walks_equal_a_plain_loop_at_every_point_of_the_grid():
    torch.manual_seed(3)
    queries = torch.randn(4, 60, 6).cumsum(1)
    found = recompute_shares(queries, GRID)
    assert 0.05 < found[..., 0].mean() < 0.6
    for head in range(4):
        for point, thresholds in enumerate(GRID):
            expected = replay_by_loops(queries[head].tolist(), *thresholds)
            assert found[head, point].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("steps", "replayed"), [(20, 21), (3, 53)])
def test_decoded_queries_are_replayed_and_those_of_the_prompt_where_they_are_few(steps, replayed):
    model, study = kvtool.attach(peaky_model("llama")), RecomputeFrequency(steps)
    seen = watch(model, random_ids(50), steps, study)
    found = study.results()["recompute_frequency"]
    for layer in (0, 1):
        queries = torch.cat([query for index, _, query, _ in seen if index == layer], 1)
        for head in range(8):
            expected = replay_by_loops(queries[head, -replayed:].tolist(), *GRID[0])
            assert found[layer][head, 0].tolist() == pytest.approx(expected)
