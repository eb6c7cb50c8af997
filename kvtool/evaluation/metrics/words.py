"""Overlap of words in answers to questions, as LongBench scores them (and SQuAD before it).

https://github.com/THUDM/LongBench. InfiniteBench scores its English questions in the same way.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def answer_words(text: str) -> list[str]:
    """Return the words of an answer, in lower case, without ASCII punctuation and articles.

    >>> answer_words("The U.S. Army's an-swer")
    ['us', 'armys', 'answer']
    """
    return _ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def qa_f1(prediction: str, reference: str) -> float:
    """Return the F1 of the words, each counted as often as it stands there, from 0 to 1.

    >>> round(qa_f1("Paris, in France", "Paris"), 3)
    0.5
    """
    said, wanted = answer_words(prediction), answer_words(reference)
    same = (Counter(said) & Counter(wanted)).total()
    if same == 0:
        return 0.0
    precision, recall = same / len(said), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def first_line(prediction: str) -> str:
    """Return an answer up to its first line end, leading ones aside.

    >>> first_line("\\n\\nParis\\nQuestion: ..")
    'Paris'
    """
    return prediction.lstrip("\n").split("\n")[0]


def best(metric: Callable[[str, str], float], prediction: str, references: Sequence[str]) -> float:
    """Return the score against the reference that suits the answer best."""
    return max(metric(prediction, reference) for reference in references)
