"""Whether an answer contains what was asked for.

`string_match_all` and `string_match_part` are RULER's (https://arxiv.org/abs/2404.06654): another
harness averages over references in the second, where RULER takes the best. For the needle in a
haystack everyone scores differently; `contains` is what is mostly called exact match there, and
`word_share` what the heat maps of KVCache-Factory show.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def readable(prediction: str) -> str:
    """Strip an answer and turn control characters into line ends, as RULER does."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Return the fraction of references that are part of the answer, letter case aside.

    >>> string_match_all("It is Paris.", ["paris", "rome"])
    0.5
    """
    text = readable(prediction).lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """Return 1 if any reference is part of the answer, letter case aside, else 0.

    >>> string_match_part("It is Paris.", ["paris", "rome"])
    1.0
    """
    text = readable(prediction).lower()
    return float(any(reference.lower() in text for reference in references))


def words_match_all(prediction: str, references: Sequence[str]) -> float:
    """Return the fraction of references that are a word of the answer, in the same letter case.

    >>> words_match_all(" BA CE. Because", ["BA", "CE", "DI", "Be"])
    0.5
    """
    words = set(re.findall(r"\w+", prediction))
    return sum(reference in words for reference in references) / len(references)


def normalise(text: str) -> str:
    """Lower the case, drop punctuation (`1,234` is 1234) and join words by single spaces."""
    kept = (char for char in text.lower() if not unicodedata.category(char).startswith("P"))
    return " ".join("".join(kept).split())


def contains(prediction: str, reference: str) -> float:
    """Return 1 if the normalised reference is part of the normalised answer, else 0.

    >>> contains("The code is 74,291", "74291"), contains("7429", "74291")
    (1.0, 0.0)
    """
    return float(normalise(reference) in normalise(prediction))


def word_share(prediction: str, reference: str) -> float:
    """Return the fraction of the reference's different words that the answer has.

    >>> word_share("eat a sandwich", "Eat a sandwich outside!")
    0.75
    """
    wanted = set(normalise(reference).split())
    return len(wanted & set(normalise(prediction).split())) / len(wanted)
