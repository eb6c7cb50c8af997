"""Which function an answer repeats."""

import pytest

from kvtool.evaluation.metrics.code import (
    first_code_block,
    repeats_function,
    similarity,
)

pytest.importorskip("sacrebleu")

ADD = (
    "def add(numbers, start):\n    total = start\n    for number in numbers:\n"
    "        if number is not None:\n            total = total + number\n    return total\n"
)
MULTIPLY = ADD.replace("total + number", "total * number")
OTHER = "def read(path):\n    with open(path) as file:\n        return file.read()\n"


def test_a_worked_similarity():
    # 4 of 5 words; 3 of 4 pairs, 2 of 3 triples, 1 of 2 quadruples: (.8 .75 .667 .5)^(1/4)
    assert similarity("a b c d x", "a b c d e") == pytest.approx((0.8 * 0.75 * 2 / 3 * 0.5) ** 0.25)
    # all right but one word short: exp(1 - 5/4)
    assert similarity("a b c d", "a b c d e") == pytest.approx(0.7788, abs=1e-4)
    assert similarity("a  b\n c d e", "a b c d e") == pytest.approx(1)
    assert similarity("", "a b c d e") == 0


def test_the_right_function_must_be_nearest_and_near():
    for answer, right in [
        (ADD, True),
        (f"Here it is:\n```python\n{ADD}```\nIt adds.", True),
        (f"```\n{OTHER}```\n```\n{ADD}```", False),  # the first block counts
        (OTHER, False),
        (MULTIPLY, False),  # near, but nearer to the other one
        ("def add(numbers, start): pass", False),  # nearest to it, but too far
        ("", False),
    ]:
        assert repeats_function(answer, ADD, [ADD, MULTIPLY, OTHER]) is right


def test_a_near_function_counts_where_nothing_is_nearer():
    assert similarity(MULTIPLY, ADD) > 0.8
    assert repeats_function(MULTIPLY, ADD, [ADD, OTHER]) is True


def test_code_that_is_not_closed_is_the_whole_answer():
    assert first_code_block(" ```python\nx = 1\n ") == "```python\nx = 1"
