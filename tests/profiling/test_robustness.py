import math

import pytest
import torch

import kvtool
from kvtool.profiling.roco import Persistence, Robustness
from tests.models_for_tests import peaky_model, random_ids
from tests.profiling.watching import full_attention, watch

WORKED = [0.5, 0.1, 0.3, 0.05, 0.05, 0.05, 0.05, 0.05]
STDS = [0, 0.2, 0.163299, 0.178098, 0.176068, 0.170171, 0.163507, 0.156998]


def rows_with_first_token(weights):
    """Rows of a causal map whose first column is given; the rest does not matter."""
    n = len(weights)
    rows = torch.zeros(1, n, n)
    rows[0, :, 0] = torch.tensor(weights)
    return rows


def test_the_worked_curve_peaks_at_its_second_step():
    for rows in [1, 3, 8]:
        n, whole = len(WORKED), rows_with_first_token(WORKED)
        found = Persistence(1, n)
        for start in range(0, n, rows):
            stop = min(start + rows, n)
            found.add(whole[:, start:stop, :stop])
        # every other token gets 0 for ever: the mean over the n - k + 1 tokens gives token 0's std
        curve = (found.curve()[0] * torch.arange(n, 0, -1)).tolist()
        assert curve == pytest.approx(STDS, abs=1e-6)
        assert found.peak[0, 0].item() == 2


def stds_by_loops(rows, token):
    stds = []
    for k in range(1, len(rows) - token + 1):
        seen = [rows[token + i][token].item() for i in range(k)]
        mean = sum(seen) / k
        stds.append(math.sqrt(sum((a - mean) ** 2 for a in seen) / k))
    return stds


def test_a_model_equals_plain_loops_over_tokens():
    n, steps = 70, 9
    model, study = kvtool.attach(peaky_model("llama")), Robustness(n + steps)
    seen = watch(model, random_ids(n), steps, study)
    found = study.results()
    for layer in (0, 1):
        heads = full_attention(seen, layer, 16**-0.5)
        for group in (0, 1):
            members = heads[4 * group : 4 * group + 4]
            rows = [sum(head[i].double() for head in members) / 4 for i in range(n + steps)]
            stds = [stds_by_loops(rows, token) for token in range(n + steps)]
            curve = [
                sum(s[k] for s in stds if k < len(s)) / (n + steps - k) for k in range(n + steps)
            ]
            assert found["robustness_curve"][layer][group].tolist() == pytest.approx(
                curve, abs=1e-6
            )
            judged = [s for s in stds if len(s) > 50]
            early = sum(max(range(len(s)), key=s.__getitem__) < 50 for s in judged)
            assert found["robustness"][layer][group].item() == pytest.approx(early / len(judged))


def test_a_short_text_has_no_answer():
    found = Persistence(1, 8)
    found.add(rows_with_first_token(WORKED))
    assert found.early().isnan().all()
