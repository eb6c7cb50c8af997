r"""Final answers at the end of chains of thought."""

from fractions import Fraction

from kvtool.evaluation.metrics.maths import boxed_answer, last_boxed, number_answer
from kvtool.evaluation.metrics.text import said, split_thought


def test_the_last_box_that_is_whole_and_filled():
    for text, held in [
        (r"It is \boxed{5}.", "5"),
        (r"\boxed{1} no \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),  # escaped braces do not count
        (r"$\boxed 7$ or so", "7"),
        (r"\fbox{3}", "3"),
        (r"\boxed{4} and then \boxed{cut o", "4"),
        (r"\boxed{4}, as asked for in \boxed{}", "4"),
        (r"\boxed{", None),
        ("the answer is 5", None),
        ("", None),
    ]:
        assert last_boxed(text) == held


def test_an_answer_that_goes_round_in_circles_is_read_at_once():
    assert last_boxed("\\boxed{3}" + "\\boxed{" * 50_000) == "3"


def test_boxed_answers():
    for prediction, answer in [
        (r"\boxed{5}", "5"),
        (r"<think>\boxed{4}</think> \boxed{5}", "5"),
        (r"\boxed{4}</think> \boxed{5}", "5"),  # the tag was opened by the template
        (r"<think>so \boxed{4}</think> It is four.", "4"),
        (r"<think>so \boxed{4}. Wait, let me check", "4"),  # given outright, though cut off
        ("<think>so it is 4. Wait", None),
        ("It is 4.", None),
        ("", None),
    ]:
        assert boxed_answer(prediction) == answer


def test_numbers_that_answer():
    for prediction, number in [
        ("6 * 3 = 18\n#### 18", 18),
        ("#### 1. Count\n6 * 3 = 18\n#### 18", 18),  # a heading of Markdown comes first
        ("#### Step 1\n### 2\nso 6 * 3 = 18.", 18),
        ("#### $1,018.50", Fraction(2037, 2)),
        ("#### -3", -3),
        ("#### n is what I write: 7", 7),
        (r"so \boxed{18} dollars for 3 of them", 18),
        (r"\boxed{\frac{1}{2}}", Fraction(1, 2)),
        ("It takes 3 days, so 18.", 18),
        ("It costs $1,018.", 1018),
        ("10-3 is 7", 7),
        ("in 2-3 days", 3),
        ("that is -5 degrees", -5),
        ("eighteen", None),
        ("", None),
        ("<think>7? 8?</think> It is 18.", 18),
        ("<think>7? 8?</think> It is so.", None),  # a thought counts only where it is marked
        ("<think>#### 8</think> It is so.", 8),
        ("<think>so far 7 and 8", None),
        ("<think>I will write #### 8 and", 8),
        ("7 and 8</think>9", 9),
    ]:
        assert number_answer(prediction) == number


def test_thoughts_are_split_off():
    assert split_thought("a</think>b</think>c") == ("a</think>b", "c")
    assert said("<think>a</think> b") == " b"
    assert said("b") == "b"
    assert said("<think>b") == ""
