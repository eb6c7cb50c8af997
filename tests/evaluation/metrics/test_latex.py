r"""Answers in LaTeX: what is the same, and what is not."""

from fractions import Fraction

from kvtool.evaluation.metrics.maths import as_number, plain_latex, same_answer


def test_what_does_not_matter_goes():
    for answer, plain in [
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\tfrac{1}2", r"\frac{1}{2}"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (r"\cfrac{3}{4}", r"\frac{3}{4}"),
        (r"3/4", r"\frac{3}{4}"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"\sqrt[3]{2}", r"\sqrt[3]{2}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"\bigl[0, 1\bigr)", "[0,1)"),
        (r"$\displaystyle x^2$", "x^2"),
        (r"\(5\)", "5"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        (r"45\degree", "45"),
        (r"50\%", "50"),
        (r"\$18.50", "18.50"),
        (r"10\text{ cm}", "10"),
        (r"10\text{ cm}^2", "10"),
        (r"10~\mathrm{m}^{3}", "10"),
        (r"12 square feet", "12"),
        (r"8 km^2", "8"),
        (r"\text{Evelyn}", "evelyn"),
        (r"\textbf{(C)}", "C"),
        (r"(C)", "C"),
        (r"2 \text{ or } 3", "2or3"),  # no unit: it does not end the answer
        (r"x = 5", "5"),
        (r"x \in [1, 2]", "[1,2]"),
        (r"f(x) = 5", "f(x)=5"),
        (r"x \le 5", r"x\leq5"),
        (r"\left\{1\right\}", r"\{1\}"),
        (r"\leftarrow", r"\leftarrow"),
        (".5", "0.5"),
        ("5.", "5"),
        ("X", "X"),
        ("", ""),
    ]:
        assert plain_latex(answer) == plain
        assert plain_latex(plain) == plain


def test_numbers_are_read_as_numbers():
    for text, number in [
        ("7", 7),
        ("-7", -7),
        ("073", 73),
        ("2.50", Fraction(5, 2)),
        ("1,250", 1250),
        ("1,250.5", Fraction(2501, 2)),
        (r"\frac{6}{4}", Fraction(3, 2)),
        (r"-\frac{1}{2}", Fraction(-1, 2)),
        (r"\frac{-1}{2}", Fraction(-1, 2)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        (r"-1\frac{1}{2}", Fraction(-3, 2)),
        (r"\frac{1}{0}", None),
        ("1,23", None),
        ("(1,234)", None),  # a pair
        ("2+3", None),
        ("x", None),
        ("", None),
        ("9" * 5000, None),  # more than Python reads
    ]:
        assert as_number(text) == number


def test_equal_answers():
    for answer, reference, same in [
        ("0.5", r"\frac{1}{2}", True),
        ("1{,}000", "1000", True),
        (r"1\,000", "1,000", True),
        ("73.0", "073", True),
        (r"\frac{\sqrt3}{2}", r"\dfrac{\sqrt{3}}{2}", True),
        ("(2, 3)", "(2,3)", True),
        ("0.33", r"\frac13", False),
        ("(2,3)", "(3,2)", False),
        ("x", "X", False),
        ("even", "Even", True),
        ("6-5i", "6 - 5i", True),
        ("2+3", "5", False),
        ("", "5", False),
    ]:
        assert same_answer(answer, reference) is same
        assert same_answer(reference, answer) is same
