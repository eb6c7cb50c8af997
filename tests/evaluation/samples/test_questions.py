"""Answers and options of rows."""

import pytest

from kvtool.errors import KvtoolError
from kvtool.evaluation.samples.questions import option_answer, require, split_option, texts_of

OPTIONS = ["red", "blue. Dark", "green", "white"]


@pytest.mark.parametrize(
    ("answer", "texts"),
    [("red", ("red",)), (7, ("7",)), (["red", 7], ("red", "7")), (("a",), ("a",))],
)
def test_answers_become_texts(answer, texts):
    assert texts_of(answer) == texts


@pytest.mark.parametrize(
    "answer", ["blue. Dark", ["blue. Dark"], ["blue. Dark", "B"], "B", ["B"], ["dark blue", "B"]]
)
def test_the_right_option_is_found_by_text_or_letter(answer):
    reference = option_answer(answer, OPTIONS, "row 1")
    assert reference == "B. blue. Dark"
    assert split_option(reference) == ("B", "blue. Dark")


def test_a_text_goes_before_a_letter():
    assert option_answer("C", ["A", "B", "D", "C"], "row 1") == "D. C"


def test_options_without_the_answer_are_refused():
    with pytest.raises(KvtoolError, match="row 3: none of its options is the answer `pink`"):
        option_answer("pink", OPTIONS, "row 3")
    with pytest.raises(KvtoolError, match="row 3 has 2 options instead of 4"):
        option_answer("red", OPTIONS[:2], "row 3")


@pytest.mark.parametrize("row", [{"a": 1}, {"a": 1, "b": None}, {"a": 1, "b": []}])
def test_what_is_lacking_is_named(row):
    with pytest.raises(KvtoolError, match="row 2 lacks `b`"):
        require(row, ["a", "b"], "row 2")
    require({"a": 0, "b": ""}, ["a", "b"], "row 2")
