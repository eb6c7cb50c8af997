"""Numbers and keys read out of an answer, as InfiniteBench and SCBench do it.

https://github.com/OpenBMB/InfiniteBench and https://github.com/microsoft/MInference (scbench). Only
the digits 0 to 9 count; there a minus sign is read in the last word only, and here too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
