r"""The final answer at the end of a chain of thought, as GSM8K, MATH and AIME read it.

GSM8K (Cobbe et al., 2021, https://arxiv.org/abs/2110.14168) ends answers with `#### 18`; where a
model does not, its last number counts. MATH and AIME take the last `\boxed{..}`. What is said after
`</think>` is looked at first. In the thought itself only an answer that is marked as final counts,
so that a thought which never ends has one only if it gives it outright.
"""

from __future__ import annotations

import re
from fractions import Fraction

from kvtool.evaluation.metrics.latex import as_number, plain_latex
from kvtool.evaluation.metrics.thinking import split_thought

_AMOUNT = r"\\?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(rf"(?:(?<![\w.)])-)?{_AMOUNT}")  # in 10-3 the second number is 3
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
    """Return, for each brace that opens, where the one that closes it stands."""
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

    The first `#### NUMBER` counts, then the last boxed number, then the last number said.

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
    numbers = _NUMBER.findall(text)
    return _value(numbers[-1]) if numbers else None


def marked_number(text: str) -> Fraction | None:
    """Return the number after the first `####`, None if there is none."""
    found = _MARKED.search(text)
    return _value(found[1]) if found else None


def _value(number: str) -> Fraction | None:
    return as_number(plain_latex(number.replace(",", "").replace(" ", "")))
