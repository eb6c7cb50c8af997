"""DuoAttention's budget, its ranking of heads and the proxy, against loops and worked numbers."""

import math

import pytest
import torch

from kvtool.errors import UsageError
from kvtool.policies.allocate.duo import (
    UNLIMITED,
    Duo,
    rank_heads,
    reach_of_heads,
    read_scores,
    retrieval_ratio,
    sink_tokens,
)
from kvtool.policies.allocate.problem import Heads

GATES = torch.tensor([[0.9, 0.1, 0.5], [0.5, 0.0, 0.7]])


def share(budget, context):
    return retrieval_ratio(torch.tensor(budget), torch.tensor(context)).item()


@pytest.mark.parametrize(("budget", "expected"), [(4096, 0.107570), (1024, 0.011952)])
def test_what_streaming_heads_leave_pays_for_retrieval_heads(budget, expected):
    found = share(budget, 32768)
    assert found == pytest.approx(expected, abs=5e-7)
    assert found * 32768 + (1 - found) * 640 == pytest.approx(budget)


@pytest.mark.parametrize(
    ("budget", "sink", "recent"),
    [(640, 128, 512), (512, 128, 384), (257, 128, 129), (256, 51, 205)],
)
def test_small_budgets_leave_only_streaming_heads(budget, sink, recent):
    assert share(budget, 32768) == 0
    assert sink_tokens(budget) == sink_tokens(torch.tensor(budget)) == sink
    assert budget - sink == recent


def test_a_budget_of_the_whole_context_streams_nowhere():
    assert share(4096, 4096) == share(600, 500) == 1


def test_the_highest_scores_of_all_layers_come_first_and_ties_go_to_the_lower_layer():
    assert rank_heads(GATES).tolist() == [[0, 4, 2], [3, 5, 1]]
    assert rank_heads(torch.full((2, 2), 0.5)).tolist() == [[0, 1], [2, 3]]


def test_heads_are_told_apart_row_by_row():
    """Six heads; a mean of 2440 of 10640 tokens lets 0.18 of them, one head, keep everything."""
    heads = Heads(
        budget=torch.tensor([2440, 4000, 300]).view(3, 1, 1),
        importance=torch.zeros(3, 3, 1),
        positions=torch.zeros(3, 3, 1),
        protected=None,
        min_free=1,
        tokens_seen=torch.tensor([10640, 10640, 10640]).view(3, 1, 1),
        rank=rank_heads(GATES)[0],
        of=6,
    )
    assert Duo().tokens(heads).tolist() == [
        [UNLIMITED, 640, 640],
        [UNLIMITED, 640, 640],
        [300, 300, 300],
    ]
    more = Duo().tokens(Heads(**(vars(heads) | {"budget": 5640})))
    assert more[0].tolist() == [UNLIMITED, 640, UNLIMITED]


def test_the_reach_of_heads_against_loops():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 30, 8, generator=generator)
    key = torch.randn(2, 2, 30, 8, generator=generator)
    expected = []
    for head in range(4):
        logits = []
        for distance in range(9):
            dots = [
                float(query[row, head, t] @ key[row, head // 2, t - distance]) / math.sqrt(8)
                for row in range(2)
                for t in range(8, 30)
            ]
            logits.append(sum(dots) / len(dots))
        total = sum(math.exp(x) for x in logits)
        weights = [math.exp(x) / total for x in logits]
        far_first = weights[::-1]
        expected.append(sum(sum(far_first[: i + 1]) for i in range(9)) / 9)
    found = reach_of_heads(query, key, 8**-0.5, 9)
    pairs = [(expected[0] + expected[1]) / 2, (expected[2] + expected[3]) / 2]
    assert found.tolist() == pytest.approx(pairs, rel=1e-4)


def test_scores_come_from_a_table(tmp_path):
    path = tmp_path / "Gates.tsv"
    path.write_text("0.9\t0.1\t0.5\n0.5\t0\t0.7\n")
    assert torch.allclose(read_scores(str(path), (2, 3)), GATES.double())
    for text, shape, message in [
        ("0.9 0.1\n", (2, 3), "for 1 layers of 2 KV heads; this model has 2 of 3"),
        ("0.9 high\n", (1, 2), "no table of head scores"),
        ("1 nan\n", (1, 2), "not finite"),
        ("1 2\n3\n", (2, 2), "head scores for 2 layers"),
    ]:
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            read_scores(str(path), shape)
    with pytest.raises(UsageError, match="cannot read head scores"):
        read_scores(str(tmp_path / "none.tsv"), (1, 1))
