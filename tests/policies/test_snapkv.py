import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool import parse_policy
from kvtool.errors import UsageError
from tests.policies.trial import Trial, random_pair, spell
from tests.reference.selection import choose_kept, pool


def voted(votes, kernel, kind, budget, group=None):
    """A trial whose last query, alone in the window, gives exactly these votes."""
    tokens = len(votes) + 1
    weights = torch.zeros(1, 1 if group is None else len(group), tokens, tokens)
    weights[0, :, -1, :-1] = torch.tensor([votes] if group is None else group)
    text = f"snapkv(window=1,kernel={kernel},pool={kind})"
    return Trial(text, budget + 1).feed(weights)


VOTES = [0.9, 0, 0, 0.1, 0.6, 0]


@pytest.mark.parametrize(
    ("kernel", "kind", "pooled", "kept"),
    [
        (1, "max", VOTES, [0, 3, 4]),
        # (0 + .9 + 0) / 3 = .3 at the border too; (.1 + .6) / 3 = .2333; (.6 + 0) / 3 = .2
        (3, "avg", [0.3, 0.3, 0.033333, 0.233333, 0.233333, 0.2], [0, 1, 3]),
        # .6 for 3, 4 and 5: the lowest position stays
        (3, "max", [0.9, 0.9, 0.1, 0.6, 0.6, 0.6], [0, 1, 3]),
    ],
)
def test_worked_pooling(kernel, kind, pooled, kept):
    trial = voted(VOTES, kernel, kind, budget=3)
    torch.testing.assert_close(trial.scores()[0, :-1], torch.tensor(pooled), atol=1e-6, rtol=0)
    assert trial.kept() == [[*kept, 6]]  # and the window
    assert pool(VOTES, kernel, kind) == pytest.approx(pooled, abs=1e-6)
    assert choose_kept(pool(VOTES, kernel, kind), 3) == kept


def test_worked_group_is_reduced_before_pooling():
    # mean [.3, .05, .25, .05], then max of 3 neighbours; the other order would give
    # ([.6, .6, .1, .1] + [.1, .5, .5, .5]) / 2 = [.35, .55, .3, .3]
    group = [[0.6, 0, 0, 0.1], [0, 0.1, 0.5, 0]]
    trial = voted([0] * 4, 3, "max", 3, group)
    torch.testing.assert_close(trial.scores()[0, :-1], torch.tensor([0.3, 0.3, 0.25, 0.25]))


def test_the_votes_inside_the_window_are_raw():
    # 5 tokens, window 2: token 3 gets .2 + .1, token 4 its own .6; neither is pooled
    weights = torch.zeros(1, 1, 5, 5)
    weights[0, 0, 3] = torch.tensor([0.5, 0.3, 0, 0.2, 0])
    weights[0, 0, 4] = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.6])
    trial = Trial("snapkv(window=2,kernel=3)", 4).feed(weights)
    torch.testing.assert_close(trial.scores(), torch.tensor([[0.6, 0.6, 0.4, 0.3, 0.6]]))
    assert trial.protected() == [{3, 4}]


def test_an_average_over_more_than_the_text_is_divided_by_the_whole_kernel():
    # 2 tokens and a window of 1: both get (.2 + .3) / 7
    trial = voted([0.2, 0.3], 7, "avg", 1)
    torch.testing.assert_close(trial.scores()[0, :2], torch.tensor([0.5 / 7, 0.5 / 7]))


@settings(max_examples=30)
@given(
    st.integers(0, 10_000),
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.integers(1, 4),
    st.sampled_from([1, 3, 5, 7]),
    st.sampled_from(["max", "avg"]),
    st.integers(1, 3),
)
def test_scores_and_choice_equal_the_slow_twin(seed, blocks, window, kernel, kind, spare):
    options = {"window": window, "kernel": kernel, "pool": kind}
    trial, twin = random_pair(seed, blocks, window + spare, "snapkv", grain=8, **options)
    # the twin adds votes, the product may scale them: proportional is equal
    torch.testing.assert_close(scaled(trial.scores()), scaled(twin.scores()))
    assert trial.protected() == twin.protected()
    # sums of eighths are exact, so ties are ties on both sides; sevenths of them are not
    if kind == "max" and sum(blocks) > window + spare:
        assert trial.kept() == twin.kept()


def scaled(scores):
    return scores / scores.sum(-1, keepdim=True).clamp(min=1e-9)


def test_a_short_block_votes_with_what_it_has():
    # blocks of 7 and 2 under window 4: two rows vote and two tokens are forced, nothing is carried
    trial, twin = random_pair(1, [7, 2], 5, "snapkv", window=4, kernel=3)
    assert trial.protected() == twin.protected() == [{7, 8}, {7, 8}]
    assert trial.kept() == twin.kept()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": 4}, "kernel must be odd and 1 or more, got 4"),
        ({"kernel": 0}, "kernel must be odd and 1 or more, got 0"),
        ({"window": 0}, "window must be 1 or more, got 0"),
        ({"pool": "sum"}, "pool must be one of max, avg, got `sum`"),
    ],
)
def test_refuses_settings_without_meaning(options, message):
    with pytest.raises(UsageError, match=message):
        parse_policy(spell("snapkv", **options))


def test_refuses_a_window_as_large_as_the_budget():
    with pytest.raises(UsageError, match="budget 32 is not above window 32"):
        parse_policy("snapkv").check_budget(32)
