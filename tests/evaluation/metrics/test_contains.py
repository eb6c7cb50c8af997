"""Answers that contain the reference, wholly, in part or not."""

import pytest

from kvtool.evaluation.metrics.text import (
    contains,
    normalise,
    readable,
    string_match_all,
    string_match_part,
    word_share,
    words_match_all,
)


def test_control_characters_become_line_ends():
    assert readable("  one\x00two\tthree\x1f ") == "one\ntwo\nthree"
    assert readable("a\u00a0b\x7f") == "a\u00a0b\x7f"  # only the first 32 are meant


def test_all_is_a_share_and_part_is_any():
    for prediction, all_of, part in [
        ("12 and 34", 1.0, 1.0),
        ("34", 0.5, 1.0),
        ("1\x002 34", 0.5, 1.0),
        ("1 2", 0.0, 0.0),
        ("", 0.0, 0.0),
    ]:
        assert string_match_all(prediction, ["12", "34"]) == all_of
        assert string_match_part(prediction, ["12", "34"]) == part


def test_matching_ignores_letter_case():
    assert string_match_all("NEW york", ["New York", "Boston", "york"]) == pytest.approx(2 / 3)
    assert string_match_part("rome", ["Rome"]) == 1.0


def test_one_right_answer_of_three_is_enough_for_part():
    assert string_match_part("Denver Broncos", ["Denver Broncos", "The Broncos", "Denver"]) == 1.0


def test_short_names_must_be_words_in_capitals():
    assert words_match_all("BA, CE. We made a cable", ["BA", "CE", "WE", "MA"]) == 0.5
    assert words_match_all("BACE", ["BA", "CE"]) == 0.0
    assert words_match_all("", ["BA"]) == 0.0


def test_normalising_drops_case_punctuation_and_spaces():
    assert normalise(" The \n“Code”: 1,234,567!") == "the code 1234567"
    assert normalise("...") == ""


def test_contains_finds_a_number_however_it_is_written():
    assert contains("It is 7,429,103.", "7429103") == 1.0
    assert contains("17429103", "7429103") == 1.0
    assert contains("742910", "7429103") == 0.0
    assert contains("7 4 2 9 1 0 3", "7429103") == 0.0
    assert contains("", "7429103") == 0.0


def test_word_share_counts_different_words_of_the_reference():
    assert word_share("Eat outside, eat!", "eat a sandwich outside") == 0.5
    assert word_share("17429103", "7429103") == 0.0
    assert word_share("7429103.", "7429103") == 1.0
