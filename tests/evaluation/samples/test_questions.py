"""Answers and options of rows."""

import pytest

from kvtool.errors import KvtoolError
from kvtool.evaluation.samples.questions import (
    one_token_note,
    one_token_share,
    option_answer,
    require,
    split_option,
    texts_of,
)
from kvtool.evaluation.samples.sample import Sample, Turn
from tests.evaluation.tokenizers import WORDS

OPTIONS = ["red", "blue. Dark", "green", "white"]


def test_answers_become_texts():
    for answer, texts in [
        ("red", ("red",)),
        (7, ("7",)),
        (["red", 7], ("red", "7")),
        (("a",), ("a",)),
    ]:
        assert texts_of(answer) == texts


def test_the_right_option_is_found_by_text_or_letter():
    for answer in [
        "blue. Dark",
        ["blue. Dark"],
        ["blue. Dark", "B"],
        "B",
        ["B"],
        ["dark blue", "B"],
    ]:
        reference = option_answer(answer, OPTIONS, "row 1")
        assert reference == "B. blue. Dark"
        assert split_option(reference) == ("B", "blue. Dark")


def test_a_text_goes_before_a_letter():
    assert option_answer("C", ["A", "B", "D", "C"], "row 1") == "D. C"


def test_options_without_the_answer_are_refused():
    with pytest.raises(KvtoolError, match="row 3: the answer `pink` is none of 4 options"):
        option_answer("pink", OPTIONS, "row 3")
    with pytest.raises(KvtoolError, match="is none of 4 options, there are 2"):
        option_answer("red", OPTIONS[:2], "row 3")


def test_what_is_lacking_is_named():
    for row in [{"a": 1}, {"a": 1, "b": None}, {"a": 1, "b": []}]:
        with pytest.raises(KvtoolError, match="row 2 lacks `b`"):
            require(row, ["a", "b"], "row 2")
        require({"a": 0, "b": ""}, ["a", "b"], "row 2")


def asking(*answers):
    return Sample("a", "", (Turn(" Where?", answers, 8, " It is"),))


def test_answers_of_one_token_are_counted():
    for samples, share in [
        ([asking("here")], 1.0),
        ([asking("here", "there")], 1.0),
        ([asking("here", "over there")], 0.0),
        ([asking("here"), asking("there"), asking("over there")], 2 / 3),
        ([asking("x" * 41)], 0.0),  # not counted: as long as no token is
        ([asking()], 0.0),
        ([], 0.0),
    ]:
        assert one_token_share(samples, WORDS) == share


def test_it_is_said_where_most_answers_are_one_token():
    assert one_token_note("niah", 0.4) is None
    assert one_token_note("niah/city", 0.96).startswith("niah/city: 96% of the right answers are")
