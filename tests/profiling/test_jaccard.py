import math

import pytest
import torch

import kvtool
from kvtool.profiling.roco import RATES, SCORES, Jaccard, Overlap, jaccard_index
from tests.models_for_tests import peaky_model, random_ids
from tests.profiling.watching import full_attention, watch


def top(scores, budget):
    """The best tokens, of equals the earlier one."""
    return set(sorted(scores, key=lambda token: (-scores[token], token))[:budget])


def score_of(name, history, token):
    """Score of a token from the rows that it was in: (row, how many tokens the row had)."""
    weights = [row[token] for row in history if token in row]
    if name == "ltas":
        return weights[-1]
    if name == "aqas":
        return sum(row[token] >= 1 / len(row) for row in history if token in row)
    return sum(weights) if name == "aas" else sum(weights) / len(weights)


def overlap_by_loops(name, rows, budget):
    """Mean Jaccard index: sets and dictionaries, one token at a time."""
    stored, local, whole, found = set(), [], [], []
    for t, row in enumerate(rows):
        stored.add(t)
        total = sum(row[j] for j in stored)
        local.append({j: row[j] / total for j in stored})
        whole.append(dict(enumerate(row)))
        if t + 1 > budget:
            stored = top({j: score_of(name, local, j) for j in stored}, budget)
            best = top({j: score_of(name, whole, j) for j in range(t + 1)}, budget)
            found.append(len(stored & best) / len(stored | best))
    return sum(found) / len(found) if found else math.nan


def causal_rows(n, seed):
    """Peaky random weights whose third and fourth token tie wherever both are seen."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(n, n, generator=generator, dtype=torch.float64).pow(4)
    rows[:, 3] = rows[:, 2]
    rows = rows.tril()
    return rows / rows.sum(1, keepdim=True)


@pytest.mark.parametrize("score", SCORES)
def test_an_overlap_equals_sets_in_plain_loops(score):
    n, budgets = 23, [1, 4, 9, 22, 23, 40]
    maps = [causal_rows(n, seed) for seed in (1, 2, 3)]
    overlap = Overlap(score, 3, n, budgets)
    for t in range(n):
        overlap.add(torch.stack([rows[t, : t + 1] for rows in maps]).float())
    for head, rows in enumerate(maps):
        lists = [row[: t + 1].tolist() for t, row in enumerate(rows.float())]
        for i, budget in enumerate(budgets):
            expected = overlap_by_loops(score, lists, budget)
            found = overlap.mean()[head, i].item()
            assert found == pytest.approx(expected, nan_ok=True), (score, head, budget)


def test_the_worked_example_overlaps_by_half():
    members = torch.arange(4)
    one, other = torch.isin(members, torch.tensor([0, 2, 3])), members < 3
    assert jaccard_index(one, other).item() == 0.5


def test_a_model_is_judged_over_prompt_and_decoded_tokens():
    n, steps = 40, 6
    model, study = kvtool.attach(peaky_model("llama")), Jaccard(n + steps)
    seen = watch(model, random_ids(n), steps, study)
    found = study.results()
    heads = full_attention(seen, 1, 16**-0.5)
    members = heads[4:8]  # those that read KV head 1
    rows = [(sum(head[i] for head in members) / 4).tolist() for i in range(n + steps)]
    for score in ("aas", "mas"):
        for i, rate in enumerate(RATES):
            expected = overlap_by_loops(score, rows, int(rate * (n + steps)))
            assert found[f"jaccard_{score}"][1][1, i].item() == pytest.approx(expected, abs=0.02)
