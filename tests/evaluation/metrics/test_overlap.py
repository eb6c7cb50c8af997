"""BLEU and ROUGE: values by hand, and what is said where a package is missing."""

import math
import random

import pytest

from kvtool import extras
from kvtool.errors import UsageError
from kvtool.evaluation.metrics import text

SAME = "the quick brown fox jumps"


def test_worked_bleu():
    # 4 of 5 words, 3 of 4 pairs, 2 of 3 triples, 1 of 2 quadruples; equal lengths
    expected = 100 * math.prod([4 / 5, 3 / 4, 2 / 3, 1 / 2]) ** 0.25
    assert text.sentence_bleu("the quick brown fox sleeps", SAME) == pytest.approx(expected)


def test_a_short_sentence_is_scored_by_the_n_grams_it_has():
    # 2 of 2 words, 1 of 1 pair, and the penalty for 2 words instead of 5
    expected = 100 * math.exp(1 - 5 / 2)
    assert text.sentence_bleu("the quick", SAME) == pytest.approx(expected)


def test_a_corpus_is_scored_as_one():
    # n-grams are summed: 5 + 3 of 5 + 5 words, 4 + 2 of 8, 3 + 1 of 6, 2 + 0 of 4
    pairs = [SAME, "the quick brown dog sleeps"], [SAME, SAME]
    expected = 100 * math.prod([8 / 10, 6 / 8, 4 / 6, 2 / 4]) ** 0.25
    assert text.corpus_bleu(*pairs) == pytest.approx(expected)


def test_the_signature_says_how_bleu_was_computed():
    import sacrebleu

    corpus, sentence = (text.bleu_signature(sentence=choice) for choice in (False, True))
    assert "tok:13a" in corpus
    assert sacrebleu.__version__ in corpus
    assert "eff:no" in corpus
    assert "eff:yes" in sentence


def test_worked_rouge():
    assert set(text.rouge(SAME, SAME)) == {"rouge1", "rouge2", "rougeL", "rougeLsum"}
    assert text.rouge("", SAME)["rouge1"] == text.sentence_bleu("", SAME) == 0
    # against "the cats sat down": 3 of 4 words by stems, 2 of 3 pairs, 3 in order
    scores = text.rouge("the cat sat up", "the cats sat down")
    assert scores["rouge1"] == scores["rougeL"] == pytest.approx(75)
    assert scores["rouge2"] == pytest.approx(100 * 2 / 3)
    assert text.rouge("the cat sat up", "the cats sat down", stemmer=False)[
        "rouge1"
    ] == pytest.approx(50)


def test_rouge_lsum_takes_lines_for_sentences():
    scores = text.rouge("it slept\nthe cat sat", "the cat sat\nit slept")
    assert scores["rougeLsum"] == pytest.approx(100)
    assert scores["rougeL"] == pytest.approx(60)


def test_rouge_1_equals_counted_words():
    rng = random.Random(0)
    for _ in range(50):
        said, wanted = (rng.choices("abcdef", k=rng.randrange(1, 9)) for _ in range(2))
        hits = sum(min(said.count(word), wanted.count(word)) for word in "abcdef")
        expected = 200 * hits / (len(said) + len(wanted))
        assert text.rouge(" ".join(said), " ".join(wanted))["rouge1"] == pytest.approx(expected)


def test_a_missing_package_is_named(monkeypatch):
    for package, ask, what in [
        ("sacrebleu", lambda: text.sentence_bleu("a", "a"), "BLEU needs sacrebleu"),
        ("rouge_score", lambda: text.rouge("a", "a"), "ROUGE needs rouge-score"),
    ]:
        monkeypatch.setattr(
            extras, "find_spec", lambda name, gone=package: None if name == gone else object()
        )
        text.bleu_of.cache_clear()
        text._rouge.cache_clear()
        with pytest.raises(UsageError, match=what) as caught:
            ask()
        assert caught.value.hint == "pip install 'kvtool[eval]'"
