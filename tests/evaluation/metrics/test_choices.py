"""Answers that name one of four options."""

from kvtool.evaluation.metrics.code import names_function, names_option


def test_options_of_a_book():
    for answer, right in [
        ("B", True),
        (" B. the garden", True),
        ("A", False),
        ("the garden", True),
        ("the river", False),
        ("", False),
        ("  ", False),
        ("Because it is D", True),  # the first letter counts, even of a word
        ("Dickens wrote B", False),
        ("I think the answer is: B", True),
        ("I think the answer is: A, not B", False),
        ("the answer is the garden", True),
        ("the answer is:", False),
        ("so option is B.", True),
        ("maybe B", True),
        ("maybe C or B", False),
        ("no idea", False),
        ("he: AB or B", False),  # AB is in ABCD, and is not B: as in the benchmark
    ]:
        assert names_option(answer, "B", "the garden") is right


def test_options_of_code():
    for answer, right in [
        ("B", True),
        ("B.", True),
        ("B: parse_row", True),
        ("B)", True),
        (" B\nA", True),
        ("A", False),
        ("A. answer: B", True),
        ("Both", False),
        ("Because", False),
        ("The answer is: B", True),
        ("The correct option is: `B`", True),
        ("The answer is:B", False),  # one character is skipped after the cue
        ("answer: parse_row", True),
        ("answer: read_row", False),
        ("the error is in B", False),
        ("", False),
    ]:
        assert names_function(answer, "B", "parse_row") is right
