"""SirLLM's choice: the sinks, the most surprising tokens, then the newest."""

import math

import pytest
import torch

from kvtool.errors import UsageError
from kvtool.maths.selection import keep_top
from kvtool.policies.grammar import parse_policy
from kvtool.policies.parts import SlotView
from kvtool.policies.scores.sirllm import SirLLM
from tests.reference.sirllm import SlowSirLLM


def kept(policy, surprisal, budget, incoming=0, order=None):
    """Positions that stay of tokens 0.. before `incoming` more, the slots in any order."""
    n = len(surprisal)
    order = torch.arange(n) if order is None else order
    view = SlotView((), order[None, None], n, budget, n, block=incoming)
    room = max(budget - incoming, min(policy.sinks, n))
    state = {"surprisal": torch.tensor(surprisal)[order][None, None]}
    forced = policy.protected(state, view, n - room)
    score = policy.importance(state, view, None)
    return keep_top(score, view.positions, room, forced, room)[1][0, 0].tolist()


def test_the_worked_example():
    surprisal = [-math.log(p) for p in (0.9, 0.05, 0.5, 0.01, 0.8)]
    rounded = [round(number, 6) for number in surprisal]
    assert rounded == [0.105361, 2.995732, 0.693147, 4.60517, 0.223144]
    assert kept(SirLLM(sinks=1), surprisal, budget=3) == [0, 1, 3]


def test_the_newest_fill_what_surprise_leaves():
    surprisal = [0.0, 9.0, 1.0, 8.0, 2.0, 7.0, 0.5]
    assert kept(SirLLM(sinks=1, recent=2), surprisal, budget=5) == [0, 1, 3, 5, 6]
    assert kept(SirLLM(sinks=1, recent=2), surprisal, budget=5, incoming=1) == [0, 1, 5, 6]
    assert kept(SirLLM(sinks=1, recent=2), surprisal, budget=5, incoming=3) == [0, 6]
    assert kept(SirLLM(sinks=2), surprisal, budget=5, incoming=9) == [0, 1]


def test_it_is_the_plain_loop():
    for seed in range(20):
        same_as_the_loop(seed)


def same_as_the_loop(seed):
    source = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=source))

    n, sinks, recent = draw(8, 30), draw(0, 4), draw(0, 3)
    budget, incoming = draw(sinks + recent + 1, n), draw(0, 12)
    surprisal = torch.randint(0, 6, (n,), generator=source).float().tolist()  # with ties
    slow = SlowSirLLM(None, budget, sinks, recent)
    slow.kept, slow.surprisal = list(range(n)), dict(enumerate(surprisal))
    slow.cut(incoming)
    order = torch.randperm(n, generator=source)
    policy = SirLLM(sinks=sinks, recent=recent)
    assert kept(policy, surprisal, budget, incoming, order) == slow.kept


def test_its_spelling_and_what_is_refused():
    assert str(parse_policy("SirLLM(sinks=4, recent=8, decay=0.7)")) == "sirllm(recent=8,decay=0.7)"
    for text, told in [
        ("sirllm(sinks=-1)", "sirllm: sinks must be 0 or more, got -1"),
        ("sirllm(recent=-2)", "sirllm: recent must be 0 or more, got -2"),
        ("sirllm(decay=0)", "sirllm: decay must be above 0 and at most 1, got 0.0"),
        ("sirllm(decay=1.5)", "sirllm: decay must be above 0 and at most 1, got 1.5"),
        ("sirllm+caote", "and `sirllm` has none"),
        ("sirllm+uniform", "`sirllm` keeps the same in all of them"),
        ("sirllm+ada", "`ada` lets heads keep different tokens"),
        ("sirllm+cam", "`sirllm` cuts all layers at once"),
        ("sirllm+d2o-alloc", "`d2o-alloc` lets layers keep different tokens"),
    ]:
        with pytest.raises(UsageError, match=told):
            parse_policy(text)
    with pytest.raises(UsageError, match="budget 6 is not above sinks 4 \\+ recent 2 = 6"):
        parse_policy("sirllm(recent=2)").check_budget(6)
