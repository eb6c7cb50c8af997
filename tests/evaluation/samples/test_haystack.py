"""Haystacks: sentences up to a size, needles at their depth."""

import numpy as np
import pytest

from kvtool.errors import UsageError
from kvtool.evaluation.samples.haystack import (
    costs,
    haystack,
    insert,
    split_sentences,
)
from kvtool.models.reference.filler import Filler
from kvtool.models.reference.vocabulary import decode, encode
from tests.evaluation.tokenizers import COUNTERS, REFERENCE, WORDS


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("source", ["builtin", "noise"])
def test_sentences_fill_the_room_to_the_last_one(source):
    for counter in COUNTERS.values():
        longest = max(map(counter.count, haystack(source).pool))
        for tokens in (0, 1, 100, 1024):
            sentences = haystack(source).sentences(rng(), tokens, counter)
            used = counter.count("".join(sentences)) if sentences else 0
            assert used <= tokens
            assert tokens - used < longest + 1


def test_sentences_come_up_to_128_k_tokens():
    sentences = haystack().sentences(rng(), 2**17, REFERENCE)
    assert 2**17 - 20 < REFERENCE.count("".join(sentences)) <= 2**17


def test_the_built_in_text_is_drawn_and_the_same_for_the_same_seed():
    drawn = [haystack().sentences(rng(seed), 500, WORDS) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) > 50


def test_the_built_in_text_is_not_what_the_reference_model_was_trained_on():
    trained = set(map(decode, Filler(1).take(rng(), 300_000)))
    pool = haystack().pool
    assert len(pool) > 5000
    assert len(trained.intersection(pool)) / len(pool) < 0.15  # short sentences coincide


@pytest.mark.parametrize("source", ["builtin", "noise"])
def test_own_sentences_are_words_that_the_reference_model_knows(source):
    for sentence in haystack(source).pool:
        assert sentence.startswith(" ")
        assert sentence.endswith(".")
        assert decode(encode(sentence)) == sentence
        assert REFERENCE.encode(sentence) == encode(sentence)


def test_a_file_is_read_from_a_drawn_sentence_and_again_when_it_is_too_short(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("One two. Three four five!\n\nSix seven eight nine?\n")
    hay = haystack(str(file))
    assert hay.pool == (" One two.", " Three four five!", "\n\nSix seven eight nine?")
    assert hay.name == str(file)
    again = [*hay.pool, *hay.pool]  # sentences of 2, 3 and 4 words
    expected = {0: again[:4], 1: again[1:5], 2: again[2:5]}
    found = [hay.sentences(rng(seed), 12, WORDS) for seed in range(20)]
    assert {hay.pool.index(each[0]) for each in found} == {0, 1, 2}
    assert all(each == expected[hay.pool.index(each[0])] for each in found)
    assert found == [hay.sentences(rng(seed), 12, WORDS) for seed in range(20)]


def test_splitting_loses_no_text():
    text = "A b.c costs 3.5! (Really?) “Yes.” he said…\nand on\n\nHEAD\n\n她来了。他走了！ end"
    sentences = split_sentences(f"\n {text} \n")
    assert "".join(sentences) == f" {text}"
    assert sentences == [
        " A b.c costs 3.5!",
        " (Really?)",
        " “Yes.”",
        " he said…\nand on",
        "\n\nHEAD",
        "\n\n她来了。",
        "他走了！",
        " end",
    ]


def slow_insert(sentences, needles, depths, counter):
    """Walk over the sentences, putting down each needle as soon as enough tokens have passed."""
    sizes = [len(counter.encode(sentence)) for sentence in sentences]
    result, waiting = [], sorted(zip(depths, range(len(needles)), strict=True))
    for index in range(len(sentences) + 1):
        passed = sum(sizes[:index])
        while waiting and passed * 100 >= waiting[0][0] * sum(sizes):
            result.append(needles[waiting.pop(0)[1]])
        result += sentences[index : index + 1]
    assert not waiting
    return result


def test_needles_go_where_their_share_has_passed():
    sentences = [" a b c d e f g h.", " i.", " j."]  # 8, 1 and 1 of 10 words
    for depth, place in [(0, 0), (1, 1), (50, 1), (80, 1), (80.5, 2), (90, 2), (91, 3), (100, 3)]:
        expected = [*sentences[:place], " N.", *sentences[place:]]
        assert insert(sentences, [" N."], [depth], WORDS) == expected
    assert insert([], [" N."], [50], WORDS) == [" N."]


def test_inserting_equals_the_slow_twin():
    for seed in range(20):
        draw = rng(seed)
        sentences = haystack().sentences(draw, 200, REFERENCE)
        depths = draw.integers(0, 101, 6).tolist()
        depths[3] = depths[1]
        needles = [f" N{index}." for index in range(6)]
        twin = slow_insert(sentences, needles, depths, REFERENCE)
        assert insert(sentences, needles, depths, REFERENCE) == twin


def test_costs_are_counts():
    assert costs([" a b.", " c.", " a b."], WORDS) == [2, 1, 2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "missing.txt",
            None,
            "missing.txt` is neither builtin nor noise, nor is there such a file",
        ),
        ("empty.txt", b" \n", "empty.txt` is empty"),
        (
            "latin.txt",
            b"caf\xe9.",
            "latin.txt` as UTF-8: .* byte 0xe9 in position 3",
        ),
        ("", None, "cannot read haystack .* Is a directory"),
    ],
)
def test_refuses_files_without_text(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        haystack(str(tmp_path / name))


def test_a_misspelt_name_gets_a_hint():
    with pytest.raises(UsageError) as error:
        haystack("biultin")
    assert error.value.hint == "did you mean `builtin`?"
