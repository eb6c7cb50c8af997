"""Answers to questions, scored by their words."""

import random
import string

import pytest

from kvtool.evaluation.metrics.text import answer_words, best, first_line, qa_f1


def slow_f1(prediction, reference):
    """Strike out one word of each side at a time."""

    def words(text):
        kept = "".join(char for char in text.lower() if char not in string.punctuation)
        return [word for word in kept.split() if word not in ("a", "an", "the")]

    said, wanted = words(prediction), words(reference)
    left, hits = list(wanted), 0
    for word in said:
        if word in left:
            left.remove(word)
            hits += 1
    return 0.0 if hits == 0 else 2 * hits / (len(said) + len(wanted))


def test_worked_answers():
    for prediction, reference, expected in [
        ("Paris", "Paris", 1.0),
        ("The PARIS.", "paris", 1.0),
        ("an answer: a, the", "Answer", 1.0),
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("the", "the", 0.0),  # no word is left on either side
        ("Paris Paris", "Paris", 2 / 3),  # each counts as often as it occurs
        ("in Paris in May", "in Paris in June", 0.75),
        ("U.S.", "US", 1.0),
        ("well-known", "well known", 0.0),  # a hyphen is dropped, not a space
        ("“Paris”", "Paris", 0.0),  # only ASCII punctuation is dropped
        ("the-a-b", "theab", 1.0),  # punctuation goes before articles
    ]:
        assert qa_f1(prediction, reference) == pytest.approx(expected)


def test_articles_within_words_stay():
    assert answer_words("Anna, another theme: a\tb") == ["anna", "another", "theme", "b"]


def test_random_answers_equal_the_slow_twin():
    rng = random.Random(0)
    words = ["a", "the", "An", "cat", "Cat.", "dog,", "ate", "(it)", "...", "x\ny"]
    scores = set()
    for _ in range(500):
        said, wanted = (" ".join(rng.choices(words, k=rng.randrange(8))) for _ in range(2))
        assert qa_f1(said, wanted) == pytest.approx(slow_f1(said, wanted), abs=1e-12)
        scores.add(qa_f1(said, wanted))
    assert len(scores) > 10


def test_the_best_reference_counts():
    assert best(qa_f1, "Paris in France", ["Rome", "in France", "Paris"]) == pytest.approx(0.8)


def test_the_first_line_of_an_answer():
    for answer, line in [
        ("Paris\nRome", "Paris"),
        ("\n\n Paris", " Paris"),
        (" \nParis", " "),
        ("", ""),
    ]:
        assert first_line(answer) == line
