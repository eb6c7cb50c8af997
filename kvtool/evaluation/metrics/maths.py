r"""Scores of answers that are numbers: keys and digits, final answers, and LaTeX.

Numbers and keys are read as InfiniteBench and SCBench do (https://github.com/OpenBMB/InfiniteBench,
https://github.com/microsoft/MInference, scbench). Only the digits 0 to 9 count; there a minus sign
is read in the last word only, and here too.

Final answers are at the end of a chain of thought. GSM8K (Cobbe et al., 2021,
https://arxiv.org/abs/2110.14168) ends answers with `#### 18`; where a model does not, its last
number counts. MATH and AIME take the last `\boxed{..}`. The text after `</think>` is read first. In
the thought itself only an answer that is marked as final counts, so a thought that never ends has
one only if it states it outright.

LaTeX is brought to one form, so that equal answers compare equal. The rules are those of MATH
(Hendrycks et al., 2021, https://arxiv.org/abs/2103.03874) and of Minerva (Lewkowycz et al., 2022,
https://arxiv.org/abs/2206.14858, appendix D). Sizes of brackets, spaces, units, degree, percent and
dollar signs go; `\dfrac12`, `1/2` and `\frac{1}{2}` are one. On top of that, numbers are compared
as numbers, exactly: 0.50, .5 and 1/2 are equal, 0.33 and 1/3 are not. Nothing is computed: `2+3` is
not 5.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from kvtool.evaluation.metrics.text import split_thought

_DIGITS = re.compile(r"[0-9]+")
_NUMBER = re.compile(r"[0-9]+\.[0-9]+|[0-9]+")
_INTEGER = re.compile(r"([+-]?)([0-9]+)")
_AROUND_WORDS = str.maketrans(dict.fromkeys("\n:\"'.,?!{}", " "))
_AROUND_RESULTS = str.maketrans(dict.fromkeys("\n.`'\":", " "))


def first_digits(text: str) -> str | None:
    """Return the first run of digits as it is written, None if there is none.

    >>> first_digits("It is 07, not 12.")
    '07'
    """
    found = _DIGITS.search(text)
    return found[0] if found else None


def first_number(text: str) -> str | None:
    """Return the whole part of the first number, None if there is none.

    >>> first_number("about 012.7, or 3")
    '12'
    """
    found = _NUMBER.search(text)
    return _plain(found[0].partition(".")[0]) if found else None


def last_integer(text: str) -> str | None:
    """Return the last word if it is a whole number, None if it is not.

    >>> last_integer("The result is: -7."), last_integer("7 apples")
    ('-7', None)
    """
    words = text.translate(_AROUND_RESULTS).split()
    found = _INTEGER.fullmatch(words[-1]) if words else None
    if not found:
        return None
    digits = _plain(found[2])
    return f"-{digits}" if found[1] == "-" and digits != "0" else digits


def leading_share(text: str, values: Sequence[str]) -> float:
    """Return the fraction of `values` that the numbers of a text give before the first wrong one.

    >>> leading_share("[1, 4, 9, 8]", ["1", "4", "8", "8"])
    0.5
    """
    right = 0
    for said, value in zip(_DIGITS.findall(text), values, strict=False):
        if _plain(said) != value:
            break
        right += 1
    return right / len(values)


def words_of(text: str) -> list[str]:
    """Return the words of an answer without the punctuation that may touch them.

    >>> words_of('"a-1": {b}.')
    ['a-1', 'b']
    """
    return text.translate(_AROUND_WORDS).split()


def _plain(digits: str) -> str:
    """Drop leading zeros; a string, since Python refuses to read numbers of thousands of digits."""
    return digits.lstrip("0") or "0"


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
    r"""Return whether two answers are equal, as text or as numbers.

    >>> same_answer(r"\dfrac{3}{4}", "0.75"), same_answer(r"10\%", "10"), same_answer("2+3", "5")
    (True, True, False)
    """
    one, other = plain_latex(answer), plain_latex(reference)
    if one == other:
        return True
    number = as_number(one)
    return number is not None and number == as_number(other)


_AMOUNT = r"\\?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_LAST_NUMBER = re.compile(rf"(?:(?<![\w.)])-)?{_AMOUNT}")  # in 10-3 the second number is 3
_MARKED = re.compile(rf"####\s*(-?\s*{_AMOUNT})")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped one is passed over
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed\s+(?=[^\s{])")


def last_boxed(text: str) -> str | None:
    r"""Return what the last whole, filled `\boxed{..}` holds, None if there is none.

    >>> last_boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}} (\boxed{} and \boxed{cut")
    '\\frac{1}{2}'
    >>> last_boxed(r"$\boxed 7$")
    '7'
    """
    closing = _closing_braces(text)
    for found in reversed(list(_BOX.finditer(text))):
        start = found.end()
        if text[start] != "{":
            return re.split(r"[\s$]", text[start:], maxsplit=1)[0]
        if start in closing and (held := text[start + 1 : closing[start]].strip()):
            return held
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """Return, for each brace that opens, the place of the one that closes it."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for found in _BRACES.finditer(text):
        if found[0] == "{":
            opened.append(found.start())
        elif found[0] == "}" and opened:
            closing[opened.pop()] = found.start()
    return closing


def boxed_answer(prediction: str) -> str | None:
    """Return the boxed answer of MATH and AIME, None if there is none.

    >>> boxed_answer(r"<think>\\boxed{1}? No.</think> It is \\boxed{2}.")
    '2'
    """
    thought, said = split_thought(prediction)
    found = last_boxed(said or "")
    return last_boxed(thought) if found is None else found


def number_answer(prediction: str) -> Fraction | None:
    """Return the number that answers a question of GSM8K, None if there is none.

    The last `#### NUMBER` counts, then the last boxed number, then the last number said. (The
    harnesses take the first `####`, which may be a heading of a model that writes Markdown.)

    >>> number_answer("6 * 3 = 18.\\n#### $1,018.00"), number_answer("So it takes 18 days.")
    (Fraction(1018, 1), Fraction(18, 1))
    """
    thought, said = split_thought(prediction)
    for found in (_outright(said or ""), _last_number(said or ""), _outright(thought)):
        if found is not None:
            return found
    return None


def _outright(text: str) -> Fraction | None:
    """Return the number that is marked as final."""
    found, boxed = marked_number(text), last_boxed(text)
    return as_number(plain_latex(boxed)) if found is None and boxed is not None else found


def _last_number(text: str) -> Fraction | None:
    numbers = _LAST_NUMBER.findall(text)
    return _value(numbers[-1]) if numbers else None


def marked_number(text: str) -> Fraction | None:
    """Return the number after the last `####`, None if there is none."""
    found = _MARKED.findall(text)
    return _value(found[-1]) if found else None


def _value(number: str) -> Fraction | None:
    return as_number(plain_latex(number.replace(",", "").replace(" ", "")))
