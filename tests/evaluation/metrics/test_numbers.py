"""Numbers and words read out of answers."""

import re

from hypothesis import given
from hypothesis import strategies as st

from kvtool.evaluation.metrics.maths import (
    first_digits,
    first_number,
    last_integer,
    leading_share,
    words_of,
)

ANSWERS = st.text(st.sampled_from("0123456789 .,-+x\n:\"'"), max_size=30)


@given(ANSWERS)
def test_the_first_digits_are_those_that_splitting_at_everything_else_gives(text):
    pieces = [piece for piece in re.split("[^0-9]", text) if piece]
    assert first_digits(text) == (pieces[0] if pieces else None)


@given(ANSWERS)
def test_the_first_number_is_read_up_to_its_point(text):
    pieces = [piece for piece in re.split("[^0-9.]", text) if re.search("[0-9]", piece)]
    if not pieces:
        assert first_number(text) is None
        return
    digits = next(part for part in pieces[0].split(".") if part)
    assert first_number(text) == str(int(digits))


def test_first_number():
    for text, number in [
        (" 12", "12"),
        ("12.9 or 13", "12"),
        ("it is 007", "7"),
        ("-5", "5"),  # the sign is not read, as in the benchmark
        (".5", "5"),
        ("0", "0"),
        ("", None),
        ("none", None),
    ]:
        assert first_number(text) == number


def test_last_integer():
    for text, number in [
        (" -7\n", "-7"),
        ("f(3) is `12`.", "12"),
        ("+4", "4"),
        ("-0", "0"),
        ("12 apples", None),
        ("return: 5", "5"),
        ("", None),
        (" .", None),
        ("3-4", None),
    ]:
        assert last_integer(text) == number


def test_leading_share():
    for text, share in [
        ("[1, 4, 8, 7]", 1.0),
        ("1 4 8", 0.75),
        ("1, 4, 9, 7", 0.5),  # 7 is right again, but after a wrong one
        ("4, 8, 7", 0.0),
        ("", 0.0),
        ("1 4 8 7 100 200", 1.0),
    ]:
        assert leading_share(text, ["1", "4", "8", "7"]) == share


def test_an_endless_number_is_wrong_but_no_failure():
    endless = "9" * 10_000
    assert first_number(endless) == endless
    assert last_integer(endless) == endless
    assert leading_share(endless, ["9"]) == 0


def test_words_lose_their_punctuation_but_keep_hyphens():
    assert words_of('Value: "4f-2a", {x}!\nOK?') == ["Value", "4f-2a", "x", "OK"]
