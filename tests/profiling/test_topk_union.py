import pytest
import torch

import kvtool
from kvtool.profiling import topk_union
from kvtool.profiling.topk_union import TopKUnion, first_steps, growth
from tests.models_for_tests import family_model, peaky_model, random_ids
from tests.profiling.watching import full_attention, watch


def test_the_worked_example_grows_to_four_tokens():
    # steps pick {0,1,2}, {0,2,5}, {1,2,5}: one query per step whose dot products say so
    picks = [{0, 1, 2}, {0, 2, 5}, {1, 2, 5}]
    keys = torch.eye(9)
    query = torch.zeros(3, 9)
    for step, tokens in enumerate(picks):
        query[step, list(tokens)] = 1.0
    first = first_steps(query[None, None], keys[None], 3)
    assert first[0, 0].tolist() == [0, 0, 0, 3, 3, 1, 3, 3, 3]
    assert growth(first, 3)[0, 0].tolist() == [3, 4, 4]


@pytest.mark.parametrize("k", [5, 100])
def test_a_model_equals_sets_in_plain_loops(k, monkeypatch):
    monkeypatch.setattr(topk_union, "TOP_K", k)
    n, steps = 40, 7
    model, study = kvtool.attach(peaky_model("llama")), TopKUnion(steps)
    seen = watch(model, random_ids(n), steps, study)
    found = study.results()
    for layer in (0, 1):
        together = [set() for _ in range(2)]
        for head, rows in enumerate(full_attention(seen, layer, 16**-0.5)):
            union = set()
            for step, row in enumerate(rows[n:]):
                union |= set(row.argsort(descending=True, stable=True)[:k].tolist())
                assert found["topk_union"][layer][head, step].item() == len(union)
            together[head // 4] |= union
        shared = found["topk_union_group"][layer][:, -1].tolist()
        assert shared == [len(union) for union in together]


def test_layers_with_a_window_are_left_out():
    model, study = kvtool.attach(family_model("gemma3")), TopKUnion(3)
    watch(model, random_ids(40), 3, study)
    assert list(study.results()["topk_union"]) == [1, 3]
