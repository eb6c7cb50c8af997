"""The F1 of single characters, for answers in Chinese, as InfiniteBench and SCBench score them.

https://github.com/OpenBMB/InfiniteBench. Their list of punctuation is replaced by Unicode's
categories, which also have the few marks and symbols that the list leaves out, such as the dot in a
foreign name.
"""

from __future__ import annotations

import unicodedata
from collections import Counter

_DROPPED = frozenset("PSZC")  # punctuation, symbols, white space, control characters


def character_f1(prediction: str, reference: str) -> float:
    """Return the F1 of the characters of an answer, punctuation and white space aside.

    >>> character_f1("他叫宝玉。", "宝玉")
    0.6666666666666666
    """
    said, wanted = _characters(prediction), _characters(reference)
    common = (said & wanted).total()
    if common == 0:
        return 0.0
    return 2 * common / (said.total() + wanted.total())


def _characters(text: str) -> Counter[str]:
    return Counter(char for char in text.lower() if unicodedata.category(char)[0] not in _DROPPED)
