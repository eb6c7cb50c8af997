"""Labels and numbers in answers, as LongBench scores them.

Every number or label that an answer names takes an equal part: "3 or 4" is half right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvtool.errors import KvtoolError

_NUMBER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """Return the reference's part of the classes named in an answer, 0 if it is not named.

    A class that is only part of the reference's name does not count. LongBench removes such classes
    from the list while it goes through it, and so does not look at the one after each; this is kept
    so that scores compare.

    >>> classification("Type: human group", "human group", ["human group", "group", "date"])
    1.0
    """
    named = [name for name in classes if name in prediction]
    i = 0
    while i < len(named):
        if named[i] in reference and named[i] != reference:
            named.remove(named[i])  # the next one takes its place and is passed over
        i += 1
    return 1 / len(named) if reference in named else 0.0


def count(prediction: str, reference: str) -> float:
    """Return which fraction of the numbers in an answer is the right one.

    >>> count("3 or 4", "3"), count("three", "3")
    (0.5, 0.0)
    """
    numbers = _NUMBER.findall(prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """Return which fraction of the numbers in an answer is that of the right paragraph.

    Args:
        prediction: names paragraphs by any number in it.
        reference: `Paragraph 7`.

    Raises:
        KvtoolError: the reference names no paragraph.
    """
    found = _PARAGRAPH.search(reference)
    if found is None:
        raise KvtoolError(f"`{reference}` names no paragraph")
    return count(prediction, found[1])
