"""RULER's needle tasks: what is hidden, how often, where, and what an oracle scores."""

import re
import uuid
from collections import Counter

import numpy as np
import pytest

from kvtool.errors import UsageError
from kvtool.evaluation.samples.fit import needed_tokens
from kvtool.evaluation.tasks.ruler import FORMS
from tests.evaluation.tasks.drawing import check_drawing, check_fill, draw, make, score
from tests.evaluation.tokenizers import COUNTERS, REFERENCE, WORDS

NAMES = [f"ruler/{form}" for form in FORMS]
SPARE = {"ruler/niah_multikey_3": 110}  # one needle more; sentences have up to 25 tokens
NEEDLE = re.compile(r" The secret code for ([\w -]+): ([\w-]+)\.")
NUMBER = re.compile(r"[1-9]\d{6}")
#        keys, values of each, asked
KEYS = {
    "niah_single_1": (1, 1, 1),
    "niah_single_2": (1, 1, 1),
    "niah_single_3": (1, 1, 1),
    "niah_multikey_1": (4, 1, 1),
    "niah_multivalue": (1, 4, 1),
    "niah_multiquery": (4, 1, 4),
}


def is_uuid(text):
    return str(uuid.UUID(text)) == text


@pytest.mark.parametrize("name", NAMES)
def test_samples_fill_their_length(name):
    smallest = 320 if name in SPARE else 256
    for length, counter in [(smallest, "reference"), (1024, "words"), (8192, "marked")]:
        check_fill(name, COUNTERS[counter], length, SPARE.get(name, 30))


@pytest.mark.exhaustive
def test_samples_fill_64_k_tokens_with_different_needles():
    (sample,) = draw("ruler/niah_multikey_2", REFERENCE, lengths=65536, samples=1)
    keys = [key for key, _ in NEEDLE.findall(sample.context)]
    assert len(keys) == len(set(keys)) > 800
    assert len({len(key.split()) for key in keys}) == 1
    assert 65536 - 30 <= needed_tokens(sample, REFERENCE) <= 65536


def test_a_sample_does_not_depend_on_what_else_is_drawn():
    for name in NAMES:
        check_drawing(name, REFERENCE)


@pytest.mark.parametrize("name", KEYS)
def test_needles_are_hidden_in_sentences(name):
    keys, values, asked = KEYS[name]
    for sample in draw(f"ruler/{name}", REFERENCE, lengths=1024, samples=5):
        stated = NEEDLE.findall(sample.context)
        assert Counter(Counter(key for key, _ in stated).values()) == {values: keys}
        assert len({value for _, value in stated}) == keys * values
        check = is_uuid if name == "niah_single_3" else NUMBER.fullmatch
        assert all(check(value) for _, value in stated)
        (turn,) = sample.turns
        assert len(turn.references) == asked * values
        assert turn.max_new_tokens == 128


@pytest.mark.parametrize("name", ["niah_multikey_2", "niah_multikey_3"])
def test_a_haystack_of_needles_is_nothing_else(name):
    for sample in draw(f"ruler/{name}", REFERENCE, lengths=1024, samples=3):
        stated = NEEDLE.findall(sample.context)
        assert NEEDLE.sub("", sample.context) == ""
        keys, values = zip(*stated, strict=True)
        assert len(keys) == len(set(keys)) == len(set(values)) >= 8
        assert all(map(is_uuid if name == "niah_multikey_3" else NUMBER.fullmatch, values))
        assert name != "niah_multikey_3" or all(map(is_uuid, keys))


def test_noise_repeats_five_sentences_and_prose_does_not():
    for name, different in [("niah_single_1", range(6, 7)), ("niah_single_2", range(50, 200))]:
        (sample,) = draw(f"ruler/{name}", REFERENCE, lengths=1024, samples=1)
        sentences = re.findall(r"[^.]+\.", sample.context)
        assert len(sentences) > 80
        assert len(set(sentences)) in different


def test_prose_may_be_a_file(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("Call me what you like. Some years ago I went to sea.")
    (prose,) = draw("ruler/niah_multikey_1", WORDS, lengths=400, samples=1, haystack=str(file))
    assert "Some years ago I went to sea." in prose.context
    (noise,) = draw("ruler/niah_single_1", WORDS, lengths=400, samples=1, haystack=str(file))
    assert "to sea" not in noise.context


def test_depths_are_spread_over_the_haystack():
    shares = []
    for sample in draw("ruler/niah_single_2", WORDS, lengths=600, samples=200):
        found = NEEDLE.search(sample.context)
        shares.append(found.start() / (len(sample.context) - len(found[0])))
    assert np.histogram(shares, 4, (0, 1))[0].min() >= 30
    assert min(shares) == 0
    assert max(shares) == 1


def oracle(sample):
    """Answer from the text alone: every value of each key that is asked for, in the order given."""
    stated = NEEDLE.findall(sample.context)
    asked = re.search(r"secret codes? for (.+)\?", sample.turns[0].question)[1].split(", ")
    return [value for key in asked for name, value in stated if name == key]


@pytest.mark.parametrize("name", NAMES)
def test_scores_of_right_half_right_and_wrong_answers(name):
    task = make(name, lengths=1024, samples=3)
    for sample in task.draw(REFERENCE):
        values = oracle(sample)
        assert sorted(values) == sorted(sample.turns[0].references)
        perfect = {"string_match_all": 100.0}
        assert score(task, sample, " " + ", ".join(values).upper() + ".") == perfect
        share = 100 * (len(values) - 1) / len(values)
        assert score(task, sample, "\n".join(values[1:])) == {"string_match_all": share}
        others = [value for _, value in NEEDLE.findall(sample.context) if value not in values]
        assert score(task, sample, " ".join(others)) == {"string_match_all": 0.0}
        assert score(task, sample, values[0][:-1]) == {"string_match_all": 0.0}
    assert task.best == 100


def test_refuses_lengths_that_the_needles_do_not_fit_in():
    with pytest.raises(
        UsageError, match=r"niah_multikey_3: length 256 is too short, .* takes 29\d"
    ):
        draw("ruler/niah_multikey_3", REFERENCE, lengths=256)
