r"""Answers in LaTeX brought to one form, so that equal ones compare equal.

The rules are those of MATH (Hendrycks et al., 2021, https://arxiv.org/abs/2103.03874) and of
Minerva (Lewkowycz et al., 2022, https://arxiv.org/abs/2206.14858, appendix D): sizes of brackets,
spaces, units, degree, percent and dollar signs go; `\dfrac12`, `1/2` and `\frac{1}{2}` are one. On
top of that, numbers are compared as numbers, exactly: 0.50, .5 and 1/2 are equal, 0.33 and 1/3 are
not. Nothing is computed: `2+3` is not 5.
"""

from __future__ import annotations

import re
from fractions import Fraction

_LONGEST_NUMBER = 100  # characters, beyond which nothing is a number

_TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"
_POWER = r"(?:\s*\^\s*\{?-?\d+\}?)?"
_UNIT = re.compile(rf"(?<=[\w)}}])\s*{_TEXT}{_POWER}\s*$")
_WORDS_AFTER_NUMBER = re.compile(
    rf"^([-+]?[\d.,/]*\d)\s+[a-zA-Z]{{2,}}(?:[\s-]+[a-zA-Z]+)*{_POWER}$"
)
_REPLACED = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\[()\[\]]|\\?\$", ""),  # where mathematics begins and ends, dollars
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])", ""),
        (r"\\(?:displaystyle|textstyle)(?![a-zA-Z])", ""),
        (r"\\[,;:!]", ""),
        (r"\\ |~|\\q?quad(?![a-zA-Z])", " "),
        (r"\{,\}", ","),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|°", ""),
        (r"\\?%", ""),
        (r"\\(le|ge|ne)(?![a-zA-Z])", r"\\\1q"),
    )
]
_SHORTHAND = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\frac([^{\\])", r"\\frac{\1}"),
        (r"\\frac(\{[^{}]*\})([^{\\])", r"\\frac\1{\2}"),
        (r"\\sqrt([^{\[\\])", r"\\sqrt{\1}"),
        (r"^([-+]?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
        (r"(?<!\d)\.(?=\d)", "0."),
        (r"^\(([A-Z])\)$", r"\1"),
    )
]
_LEFT_SIDE = re.compile(r"^[a-zA-Z]\w?\s*(?:=|\\in(?![a-zA-Z]))")
_DECIMAL = re.compile(r"[-+]?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?")
_FRACTION = re.compile(r"([-+]?)(\d*)\\frac\{([-+]?\d+)\}\{(\d+)\}")


def plain_latex(answer: str) -> str:
    r"""Return an answer without what does not matter, its fractions and roots in full.

    >>> plain_latex(r"x = \dfrac12\text{ cm}"), plain_latex(r"\text{Evelyn}"), plain_latex("8 feet")
    ('\\frac{1}{2}', 'evelyn', '8')
    """
    text = " ".join(answer.split())
    for pattern, by in _REPLACED:
        text = pattern.sub(by, text)
    text = _UNIT.sub("", text.strip())
    text = re.sub(_TEXT, r"\1", text).strip().rstrip(".")
    text = _LEFT_SIDE.sub("", text).strip()
    text = _WORDS_AFTER_NUMBER.sub(r"\1", text).replace(" ", "")
    for pattern, by in _SHORTHAND:
        text = pattern.sub(by, text)
    return text.lower() if re.fullmatch("[a-zA-Z]{2,}", text) else text


def as_number(text: str) -> Fraction | None:
    r"""Return the number that a plain answer is, None if it is none; `1\frac{1}{2}` is mixed.

    >>> as_number("1,250.50"), as_number(r"-\frac{1}{2}"), as_number(r"1\frac{1}{2}")
    (Fraction(2501, 2), Fraction(-1, 2), Fraction(3, 2))
    """
    if len(text) > _LONGEST_NUMBER:
        return None
    if _DECIMAL.fullmatch(text):
        return Fraction(text.replace(",", "").rstrip("."))
    found = _FRACTION.fullmatch(text)
    if not found or int(found[4]) == 0:
        return None
    part = Fraction(int(found[3]), int(found[4]))
    return (-1 if found[1] == "-" else 1) * (int(found[2] or 0) + part)


def same_answer(answer: str, reference: str) -> bool:
    r"""Tell whether two answers are equal, as text or as numbers.

    >>> same_answer(r"\dfrac{3}{4}", "0.75"), same_answer(r"10\%", "10"), same_answer("2+3", "5")
    (True, True, False)
    """
    one, other = plain_latex(answer), plain_latex(reference)
    if one == other:
        return True
    number = as_number(one)
    return number is not None and number == as_number(other)
