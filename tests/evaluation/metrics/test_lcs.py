"""LongBench's ROUGE-L against the recursion it is defined by, and sums by hand."""

import random
import sys
from functools import cache

import pytest

from kvtool.evaluation.metrics.text import common_words, rouge_l


def slow_lcs(reference, prediction):
    """The subsequence that is read off from the end, by recursion."""

    @cache
    def length(i, j):
        if i == 0 or j == 0:
            return 0
        if reference[i - 1] == prediction[j - 1]:
            return length(i - 1, j - 1) + 1
        return max(length(i - 1, j), length(i, j - 1))

    def read(i, j):
        if i == 0 or j == 0:
            return []
        if reference[i - 1] == prediction[j - 1]:
            return [*read(i - 1, j - 1), reference[i - 1]]
        if length(i - 1, j) > length(i, j - 1):
            return read(i - 1, j)
        return read(i, j - 1)

    return read(len(reference), len(prediction))


def slow_rouge_l(prediction, reference):
    """Sentence by sentence of the reference, counting what each one adds."""
    said, wanted = (
        [" ".join(piece.split()).split(" ") for piece in text.split(".") if len(piece) > 0]
        for text in (prediction, reference)
    )
    if not said or not wanted:
        return 0.0
    union, hits = set(), 0
    for sentence in wanted:
        before = len(union)
        for other in said:
            union |= set(slow_lcs(sentence, other))
        hits += len(union) - before
    recall = hits / len({word for words in wanted for word in words})
    precision = hits / len({word for words in said for word in words})
    return 2 * precision * recall / (precision + recall + 1e-8)


def test_worked_summaries():
    for prediction, reference, hits, said, wanted in [
        ("the cat sat", "the cat sat", 3, 3, 3),
        ("the cat sat", "a dog ran", 0, 3, 3),
        ("The cat", "the cat", 1, 2, 2),  # letter case counts
        ("cat the", "the cat", 1, 2, 2),  # order counts within a sentence
        ("cat. the", "the cat", 2, 2, 2),  # and not between sentences
        ("the the the cat", "the cat", 2, 2, 2),  # words count once
        ("a, b", "a b", 1, 2, 2),  # a comma belongs to its word
        ("v1.2 is out", "v1 2 is out", 4, 4, 4),  # every full stop ends a sentence
        ("a b. ", "a b", 2, 3, 2),  # the last piece is one empty word
        ("a b. ", "a b. ", 3, 3, 3),
        ("a b..", "a b", 2, 2, 2),  # pieces of no character are dropped
        ("a\n b\t c", "a b c", 3, 3, 3),
    ]:
        recall, precision = hits / wanted, hits / said
        expected = 2 * precision * recall / (precision + recall + 1e-8)
        assert rouge_l(prediction, reference) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("nothing", ["", ".", "..."])
def test_an_empty_text_scores_0(nothing):
    assert rouge_l(nothing, "a b") == rouge_l("a b", nothing) == rouge_l(nothing, nothing) == 0


def test_among_equally_long_subsequences_the_later_words_of_the_reference_count():
    # "x y" against "y x": both keep one word; at the tie the prediction steps back, so y is left
    assert common_words(["x", "y"], ["y", "x"]) == {"y"}
    assert common_words(["y", "x"], ["x", "y"]) == {"x"}


def test_the_choice_of_subsequence_shows_in_the_score():
    # with the tie at {x} instead, both sentences would add the same word: 1 hit, not 2
    assert rouge_l("y x. x", "x y") == pytest.approx(1.0, abs=1e-7)


@pytest.mark.parametrize("letters", ["abc", "abcdefgh"])
def test_random_documents_equal_the_slow_twin(letters):
    rng = random.Random(len(letters))
    ends = ["", " ", " ", " ", ". ", ".", " . ", "\n"]

    def document():
        return "".join(rng.choice(letters) + rng.choice(ends) for _ in range(rng.randrange(30)))

    scores = set()
    for _ in range(300):
        prediction, reference = document(), document()
        score = rouge_l(prediction, reference)
        assert score == slow_rouge_l(prediction, reference)
        scores.add(score)
    assert len(scores) > 40


def test_a_long_sentence_has_a_score():
    words = [f"w{i}" for i in range(sys.getrecursionlimit() + 50)]
    assert rouge_l(" ".join(words), " ".join(words)) == pytest.approx(1.0, abs=1e-7)
