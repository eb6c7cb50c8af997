import pytest

from kvtool.policies.allocate.duo import DuoSplit, retrieval_heads, split_budget

GATES = [[0.9, 0.1, 0.5], [0.5, 0.0, 0.7]]


@pytest.mark.parametrize(("budget", "share"), [(4096, 0.107570), (1024, 0.011952)])
def test_what_streaming_heads_leave_pays_for_retrieval_heads(budget, share):
    split = split_budget(budget, 32768)
    assert split == DuoSplit(pytest.approx(share, abs=5e-7), 128, 512)
    mean = split.retrieval * 32768 + (1 - split.retrieval) * 640
    assert mean == pytest.approx(budget)


@pytest.mark.parametrize(
    ("budget", "sink", "recent"),
    [(640, 128, 512), (512, 128, 384), (257, 128, 129), (256, 51, 205)],
)
def test_small_budgets_leave_only_streaming_heads(budget, sink, recent):
    assert split_budget(budget, 32768) == DuoSplit(0.0, sink, recent)
    assert sink + recent == budget


def test_a_budget_of_the_whole_context_streams_nowhere():
    assert split_budget(4096, 4096).retrieval == 1.0
    assert split_budget(600, 500).retrieval == 1.0


def test_the_highest_scores_of_all_layers_retrieve():
    assert retrieval_heads(GATES, 0.5) == [[True, False, True], [False, False, True]]
    assert retrieval_heads(GATES, 0.4) == [[True, False, False], [False, False, True]]


def test_the_share_is_rounded_down_and_ties_go_to_the_lower_layer():
    assert retrieval_heads(GATES, 3 / 6) == retrieval_heads(GATES, 3.9 / 6)
    equal = [[0.5, 0.5], [0.5, 0.5]]
    assert retrieval_heads(equal, 0.25) == [[True, False], [False, False]]
    assert retrieval_heads(equal, 0.75) == [[True, True], [True, False]]


def test_all_or_none():
    assert retrieval_heads(GATES, 1.0) == [[True] * 3] * 2
    assert retrieval_heads(GATES, 0.0) == [[False] * 3] * 2
