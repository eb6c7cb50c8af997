"""How close a predicted line of code is to the true one, as LongBench scores it.

LongBench uses `fuzzywuzzy`, which means `difflib` unless python-Levenshtein happens to be
installed; here it always means `difflib`, so that the score depends on the texts only.
"""

from __future__ import annotations

from difflib import SequenceMatcher

_NO_CODE = ("`", "#", "//")


def code_line(prediction: str) -> str:
    """Return the first line without a backtick, `#` or `//`; empty if every line has one.

    >>> code_line("\\n# add\\nreturn a + b\\n")
    'return a + b'
    """
    lines = prediction.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in _NO_CODE)), "")


def code_sim(prediction: str, reference: str) -> float:
    """Return the similarity of the first line of code, in whole percent, from 0 to 1.

    >>> code_sim("return a + b", "return a + c")
    0.92
    """
    line = code_line(prediction)
    if not line or not reference:
        return float(line == reference)
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100
