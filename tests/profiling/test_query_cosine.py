import math

import pytest
import torch

import kvtool
from kvtool.profiling.calidrop import QueryCosine, lag_sums
from tests.models_for_tests import peaky_model, random_ids
from tests.profiling.watching import watch


def test_sums_by_lag_equal_plain_loops():
    for n, lags in [(1, 1), (2, 1), (7, 3), (12, 4), (13, 12), (64, 5)]:
        torch.manual_seed(n)
        vectors = torch.randn(3, n, 5, dtype=torch.float64)
        found = lag_sums(vectors, lags)
        for head in range(3):
            for lag in range(1, lags + 1):
                pairs = [vectors[head, t] @ vectors[head, t - lag] for t in range(lag, n)]
                assert found[head, lag - 1].item() == pytest.approx(float(sum(pairs)), abs=1e-12)


def test_vectors_that_turn_evenly_have_the_cosine_of_their_angle():
    angle = torch.arange(40, dtype=torch.float64) * math.radians(6)
    turning = torch.stack([angle.cos(), angle.sin()], -1)[None]
    means = lag_sums(turning, 8)[0] / (40 - torch.arange(1, 9))
    expected = [math.cos(math.radians(6 * d)) for d in range(1, 9)]
    assert means.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("n", "steps"), [(100, 0), (70, 40), (30, 9)])
def test_prompt_and_decoded_queries_count_together(n, steps):
    model, study = kvtool.attach(peaky_model("llama")), QueryCosine(n + steps)
    seen = watch(model, random_ids(n), steps, study)
    found = study.results()["query_cosine"]
    lags = min(64, n + steps - 1)
    for layer in (0, 1):
        queries = torch.cat([query for index, _, query, _ in seen if index == layer], 1).double()
        assert found[layer].shape == (8, lags)
        for lag in (1, 2, 17, lags):
            cosines = torch.cosine_similarity(queries[:, lag:], queries[:, :-lag], dim=-1)
            torch.testing.assert_close(
                found[layer][:, lag - 1].double(), cosines.mean(1), rtol=1e-4, atol=1e-5
            )
