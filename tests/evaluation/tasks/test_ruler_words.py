"""Word counting: how often words are listed, and what an oracle that counts them scores."""

import math
import re
from collections import Counter

import numpy as np
import pytest

from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.samples.sample import TokenCounter
from kvtool.evaluation.tasks import ruler
from kvtool.evaluation.tasks.ruler import draw_words, frequencies
from kvtool.models.reference.vocabulary import NOUNS
from tests.evaluation.tasks.drawing import check_drawing, check_fill, draw, make, score
from tests.evaluation.tokenizers import COUNTERS, REFERENCE, WORDS

NAMES = ["ruler/cwe", "ruler/fwe"]


def listed(text):
    """The words of the last list, numbers left out."""
    return [word for word in text.rpartition(" Words: ")[2].split() if not re.match(r"\d", word)]


@pytest.mark.parametrize("name", NAMES)
def test_samples_fill_their_length(name):
    spare = 90 if name == "ruler/fwe" else 40
    for length, counter in [(500, "words"), (1024, "marked"), (8192, "reference")]:
        check_fill(name, COUNTERS[counter], length, spare)


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_does_not_depend_on_what_else_is_drawn(name):
    check_drawing(name, REFERENCE)


@pytest.mark.parametrize(("length", "often", "seldom"), [(1024, 6, 1), (4096, 30, 3)])
def test_ten_words_are_common_and_the_others_equally_rare(length, often, seldom):
    for sample in draw("ruler/cwe", REFERENCE, lengths=length, samples=3):
        counts = Counter(listed(sample.context))
        assert {word for word in counts if counts[word] == often} == set(sample.turns[0].references)
        assert set(Counter(counts.values())) == {often, seldom}
        assert Counter(counts.values())[often] == 10
        assert sample.turns[0].max_new_tokens == 120


def test_the_list_is_numbered_and_shuffled():
    (sample,) = draw("ruler/cwe", REFERENCE, lengths=1024, samples=1)
    numbers = [int(number) for number in re.findall(r" (\d+)\. [a-z]+", sample.context)]
    assert numbers == list(range(1, len(numbers) + 1))
    places = [i for i, w in enumerate(listed(sample.context)) if w in sample.turns[0].references]
    assert 0.35 < np.mean(places) / len(numbers) < 0.65


def test_a_worked_example_comes_first_from_4096_tokens_on():
    (short,) = draw("ruler/cwe", REFERENCE, lengths=4095, samples=1)
    assert short.facts == {"example": False}
    assert short.context.count("Words:") == 1
    (sample,) = draw("ruler/cwe", REFERENCE, lengths=4096, samples=1)
    assert sample.facts == {"example": True}
    example, _, asked = sample.context.rpartition(" Words:")
    shown, _, answer = example.partition(sample.turns[0].question)
    counts = Counter(listed(shown))
    assert Counter(counts.values()) == {10: 10, 3: 30}
    assert answer.startswith(sample.turns[0].answer_prefix)
    assert set(listed(answer.rpartition(":")[2])) == {w for w in counts if counts[w] == 10}
    assert not set(counts) & set(listed(f" Words: {asked}"))


def test_an_example_that_leaves_no_room_is_left_out():
    letters = TokenCounter(list, "".join)
    (sample,) = draw("ruler/cwe", letters, lengths=4500, samples=1)
    assert sample.facts == {"example": False}
    assert sample.context.startswith(" Words: 1. ")


def test_made_up_words_are_listed_only_where_others_do_not_suffice():
    (few,) = draw("ruler/cwe", REFERENCE, lengths=1024, samples=1)
    known = set(draw_words(np.random.default_rng(0), 254))
    assert set(listed(few.context)) < known
    (many,) = draw("ruler/cwe", REFERENCE, lengths=8192, samples=1)
    assert len(set(listed(many.context)) - known) > 50


def test_words_are_never_part_of_one_another():
    few = draw_words(np.random.default_rng(0), 254)
    assert len(set(few)) == 254
    assert len(set(few) & set(NOUNS)) > 190
    many = draw_words(np.random.default_rng(0), 3000)
    assert len(set(many)) == 3000
    assert set(few) < set(many)
    together = " ".join(many)
    assert all(together.count(word) == 1 for word in many)


def test_refuses_more_words_than_there_are(monkeypatch):
    monkeypatch.setattr(ruler, "_SYLLABLES", ["ba", "de", "fi"])  # 27 made-up words at most
    with pytest.raises(KvtoolError, match="200 made-up words are more than the 2"):
        draw_words(np.random.default_rng(0), 454)


def test_coded_words_follow_the_zeta_distribution():
    (sample,) = draw("ruler/fwe", WORDS, lengths=8192, samples=1)
    counts = Counter(listed(sample.context)).most_common()
    assert counts[0][0] == "..."
    assert [word for word, _ in counts[1:4]] == list(sample.turns[0].references)
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in counts[1:])
    total = sum(count for _, count in counts)
    for rank, (_, count) in enumerate(counts[:10], 1):
        assert count == pytest.approx(total / rank**2 / (math.pi**2 / 6), rel=0.05)
    assert len(counts) <= 8192 // 50
    assert sample.turns[0].max_new_tokens == 50


def test_the_three_that_are_asked_for_are_clear_at_any_length():
    for length in range(220, 900, 40):
        (sample,) = draw("ruler/fwe", REFERENCE, lengths=length, samples=1)
        counts = Counter(listed(sample.context))
        ranked = [count for _, count in counts.most_common()] + [0]
        assert ranked[0] > ranked[1]
        assert ranked[3] > ranked[4]
        assert {word for word, _ in counts.most_common(4)[1:]} == set(sample.turns[0].references)


def test_worked_frequencies():
    # 100 / zeta(2) = 60.79, a quarter 15.2, a ninth 6.75, a 16th 3.8, a 25th 2.43, a 36th 1.69
    assert frequencies(100, 6) == [60, 15, 6, 3, 2, 1]
    assert frequencies(100, 4) == [60, 15, 6, 3]
    # 50: 30.4, 7.6, 3.4, 1.9, 1.2 ties the fourth and fifth, 41: 24.9, 6.2, 2.8, 1.6, .997
    assert frequencies(50, 5) == frequencies(41, 5) == [24, 6, 2, 1, 0]


@pytest.mark.parametrize("name", NAMES)
def test_scores_of_right_partial_and_wrong_answers(name):
    task = make(name, lengths=1024, samples=3)
    for sample in task.draw(REFERENCE):
        counts = Counter(listed(sample.context))
        del counts["..."]
        asked = len(sample.turns[0].references)
        ranked = [word for word, _ in counts.most_common()]
        assert score(task, sample, ", ".join(ranked[:asked])) == {"string_match_all": 100.0}
        share = pytest.approx(100 * 2 / asked)
        assert score(task, sample, f"1. {ranked[0]}\n2. {ranked[1]}")["string_match_all"] == share
        assert score(task, sample, " ".join(ranked[asked:])) == {"string_match_all": 0.0}
        assert score(task, sample, "") == {"string_match_all": 0.0}


@pytest.mark.parametrize(("name", "length"), [("ruler/cwe", 256), ("ruler/fwe", 100)])
def test_refuses_lengths_that_the_asked_words_do_not_fit_in(name, length):
    with pytest.raises(UsageError, match=rf"{name}: length {length} is too short"):
        draw(name, REFERENCE, lengths=length)
