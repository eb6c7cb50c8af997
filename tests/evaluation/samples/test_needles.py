"""Needles: different keys and values, and questions in the reference model's own words."""

import re
import uuid

import numpy as np
import pytest

from kvtool.errors import KvtoolError
from kvtool.evaluation.samples.needles import ask, draw_keys, draw_numbers, draw_uuids, state
from kvtool.models.reference import facts
from kvtool.models.reference.vocabulary import ADJECTIVES, NOUNS, TOKEN_ID, decode, encode


def rng():
    return np.random.default_rng(0)


def test_keys_differ_and_all_have_the_same_form():
    for count, words in [(1, 1), (201, 1), (202, 2), (7035, 2), (7036, 3), (50_000, 3)]:
        keys = draw_keys(rng(), count)
        assert len(set(keys)) == count
        assert {len(key.split()) for key in keys} == {words}
        for *adjectives, noun in map(str.split, keys):
            assert noun in NOUNS
            assert set(adjectives) <= set(ADJECTIVES)


def test_refuses_more_keys_than_there_are():
    with pytest.raises(KvtoolError, match="1000000 needles are more than the 246225 keys"):
        draw_keys(rng(), 1_000_000)


def test_numbers_differ_and_have_seven_digits():
    numbers = draw_numbers(rng(), 20_000)
    assert len(set(numbers)) == 20_000
    assert all(re.fullmatch(r"[1-9]\d{6}", number) for number in numbers)


def test_uuids_are_of_version_4():
    drawn = draw_uuids(rng(), 100)
    assert len(set(drawn)) == 100
    assert {uuid.UUID(text).version for text in drawn} == {4}
    assert drawn == draw_uuids(rng(), 100)


def spell(turn):
    return turn.question + turn.answer_prefix


CODES = [encode(f" {number}") for number in ("7429103", "1234567")]
FALCON, OWL = TOKEN_ID[" falcon"], TOKEN_ID[" olive"]


def test_needles_and_questions_are_worded_as_the_reference_model_was_taught():
    assert state("falcon", "7429103") == decode(facts.needle(FALCON, CODES[0]))
    one = facts.ask_value(FALCON, CODES[0])
    assert spell(ask(["falcon"], ["7429103"], 8)) == decode(one.prompt)
    values = facts.ask_all_values(FALCON, CODES)
    assert spell(ask(["falcon"], ["7429103", "1234567"], 8)) == decode(values.prompt)
    several = facts.ask_several_keys([FALCON, OWL], CODES)
    assert spell(ask(["falcon", "olive"], ["7429103", "1234567"], 8)) == decode(several.prompt)


def test_a_question_carries_its_answers():
    turn = ask(["falcon", "olive"], ["7429103", "1234567"], 128)
    assert turn.references == ("7429103", "1234567")
    assert turn.max_new_tokens == 128
    assert turn.question.endswith(" Answer:")
