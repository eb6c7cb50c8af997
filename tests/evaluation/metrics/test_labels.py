"""Classes, counts and paragraph numbers named in answers."""

import random

import pytest

from kvtool.errors import KvtoolError
from kvtool.evaluation.metrics.text import classification, count, retrieval

CLASSES = ["human", "human group", "group", "date", "Date of birth"]


def slow_classification(prediction, reference, classes):
    """What going through a list while removing from it does, with Python's own list."""
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in reference and name != reference:
            named.remove(name)
    return 1 / len(named) if reference in named else 0.0


def test_worked_classes():
    for prediction, reference, expected in [
        ("date", "date", 1.0),
        ("a date or so", "date", 1.0),
        ("date, group", "date", 0.5),
        ("Date", "date", 0.0),  # letter case counts
        ("human", "human group", 0.0),
        ("", "date", 0.0),
        # named: human (a part, removed), human group (passed over), group (removed)
        ("human group", "human group", 1.0),
    ]:
        assert classification(prediction, reference, CLASSES) == expected


def test_the_class_after_a_removed_one_is_passed_over():
    # named: a, b, ab. a is removed, so b is passed over and shares the score
    assert classification("ab", "ab", ["a", "b", "ab"]) == 0.5
    assert classification("ab", "ab", ["a", "ab", "b"]) == 1.0


def test_random_classes_equal_the_slow_twin():
    rng = random.Random(0)
    scores = set()
    for _ in range(1000):
        pool = [left + right for left in "xyz " for right in ("", "x", "yx", "y z")]
        classes = rng.sample(pool, 6)
        reference = rng.choice(classes)
        prediction = "".join(rng.choices("xyz ", k=rng.randrange(8)))
        score = classification(prediction, reference, classes)
        assert score == slow_classification(prediction, reference, classes)
        scores.add(score)
    assert len(scores) > 3


def test_numbers_share_the_score():
    for prediction, expected in [
        ("17", 1.0),
        ("There are 17.", 1.0),
        ("17 of 30", 0.5),
        ("17, 17 or 30", 2 / 3),
        ("170", 0.0),
        ("017", 0.0),
        ("seventeen", 0.0),
        ("", 0.0),
    ]:
        assert count(prediction, "17") == pytest.approx(expected)
        assert retrieval(prediction, "Paragraph 17") == pytest.approx(expected)


def test_a_reference_without_a_paragraph_is_refused():
    with pytest.raises(KvtoolError, match="`17` names no paragraph"):
        retrieval("17", "17")
