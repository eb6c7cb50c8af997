import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool import parse_policy
from kvtool.errors import UsageError
from tests.policies.trial import FIXTURE, Trial, Twin, one_head, random_pair


def test_worked_last_row():
    trial = Trial("tova", budget=3).feed(one_head(FIXTURE))
    twin = Twin("tova", 3).feed(one_head(FIXTURE))
    for both in (trial, twin):
        torch.testing.assert_close(both.scores(), torch.tensor([[0.4, 0.1, 0.3, 0.2]]))
        assert both.kept() == [[0, 2, 3]]
    assert trial.victim() == [1]


def test_worked_block_looks_at_its_last_row_only():
    block = [[0.5, 0.3, 0.2, 0], [0.4, 0.2, 0.1, 0.3]]
    trial = Trial("tova", budget=3).feed(one_head([[1.0, 0], [0.2, 0.8]])).feed(one_head(block))
    torch.testing.assert_close(trial.scores(), torch.tensor([[0.4, 0.2, 0.1, 0.3]]))
    assert trial.victim() == [2]


def test_worked_mean_of_two_query_heads_and_its_tie():
    # (.4 + .1) / 2 = .25, (.1 + .6) / 2 = .35, (.3 + .1) / 2 = .2, (.2 + .2) / 2 = .2:
    # 2 and 3 tie, the lower position stays
    rows = torch.zeros(1, 2, 4, 4)
    rows[0, :, 3] = torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.1, 0.6, 0.1, 0.2]])
    trial, twin = Trial("tova", 3).feed(rows), Twin("tova", 3).feed(rows)
    for both in (trial, twin):
        torch.testing.assert_close(both.scores(), torch.tensor([[0.25, 0.35, 0.2, 0.2]]))
    assert trial.kept() == [[0, 1, 2]]
    assert trial.victim() == [3]


def test_worked_mean_over_the_kv_heads_of_a_layer():
    # the same two rows, now in two KV heads: by layer both keep what the mean says, by KV head
    # each what its own row says
    rows = torch.zeros(2, 1, 4, 4)
    rows[:, 0, 3] = torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.1, 0.6, 0.1, 0.2]])
    layer = Trial("tova", 3, kv_heads=2).feed(rows)
    assert layer.victim() == [3, 3]
    heads = Trial("tova(head_reduce=kv_head)", 3, kv_heads=2).feed(rows)
    assert heads.scores().tolist() == rows[:, 0, 3].tolist()
    assert heads.victim() == [1, 2]


@settings(max_examples=25)
@given(
    st.integers(0, 10_000),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(1, 6),
    st.sampled_from(["layer", "kv_head"]),
)
def test_scores_and_choice_equal_the_slow_twin(seed, blocks, budget, reduce):
    trial, twin = random_pair(seed, blocks, budget, "tova", grain=8, head_reduce=reduce)
    assert torch.equal(trial.scores(), twin.scores())
    assert trial.protected() == twin.protected() == [set(), set()]
    if sum(blocks) > budget:
        assert trial.kept() == twin.kept()


def test_heads_differ_under_a_modifier():
    policy = parse_policy("tova+caote")
    assert policy.ranking.head_reduce == "kv_head"
    assert str(policy) == "tova+caote"


def test_refuses_another_reduction():
    with pytest.raises(UsageError, match="head_reduce must be one of layer, kv_head, got `head`"):
        parse_policy("tova(head_reduce=head)")
