"""`--limit` takes samples from all cells of a task, and the same ones as a whole run."""

from collections import Counter

import pytest

from kvtool.evaluation.tasks.task import even_shares
from tests.evaluation.tasks.drawing import make
from tests.evaluation.tokenizers import WORDS


def test_shares_are_even():
    for sizes, limit, shares in [
        ([20, 20, 20], 6, [2, 2, 2]),
        ([20, 20, 20], 7, [2, 3, 2]),
        ([20, 20, 20, 20, 20], 2, [0, 1, 0, 1, 0]),
        ([20, 20, 20, 20, 20], 1, [0, 0, 1, 0, 0]),
        ([20, 1, 2], 9, [6, 1, 2]),
        ([3, 2], 10, [3, 2]),
        ([], 3, []),
    ]:
        assert even_shares(sizes, limit) == shares


@pytest.mark.parametrize(
    ("name", "settings", "cells"),
    [
        ("niah", {"lengths": [200, 300], "depths": 3}, 6),  # drawn one by one
        ("ruler/vt", {"lengths": [256, 512]}, 2),
        ("trace", {"depths": [4, 8]}, 2),  # in cells of its own
        ("ppl", {"lengths": [128, 256]}, 2),
    ],
)
def test_a_limit_spreads_over_the_cells(name, settings, cells):
    task = make(name, samples=4, **settings)
    every = list(task.draw(WORDS))
    some = task.draw_some(WORDS, 2 * cells)
    assert Counter(tuple(sample.cell.items()) for sample in some) == {
        tuple(sample.cell.items()): 2 for sample in every
    }
    assert [sample for sample in every if sample.id in {each.id for each in some}] == some
    assert task.draw_some(WORDS, 1000) == every
    assert len(task.draw_some(WORDS, 1)) == 1


def test_of_one_cell_the_first_are_taken():
    task = make("fidelity", lengths=[256], samples=4)
    assert task.draw_some(WORDS, 2) == list(task.draw(WORDS))[:2]


def test_no_more_is_drawn_than_is_asked_for(monkeypatch):
    task = make("niah", lengths=[200], depths=5, samples=20)
    drawn = []
    one = type(task).draw_one
    monkeypatch.setattr(type(task), "draw_one", lambda *args: drawn.append(1) or one(*args))
    task.draw_some(WORDS, 3)
    assert len(drawn) == 3
