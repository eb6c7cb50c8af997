"""Whether an answer says that the question cannot be answered."""

from __future__ import annotations

import re

_ABSTAINS = re.compile(
    r"\b(?:i\s+(?:do\s+not|don't)\s+(?:know|have|recall|see|find)"
    r"|(?:did\s+not|didn't|does\s+not|doesn't|do\s+not|don't|never|not|no)\s+"
    r"(?:\w+\s+){0,3}?(?:mention(?:ed)?|say|said|told|specif(?:y|ied)|provided?|discuss(?:ed)?"
    r"|information|enough|record|stated?|known|available)"
    r"|(?:cannot|can't|unable\s+to|impossible\s+to)\s+(?:be\s+)?"
    r"(?:answer(?:ed)?|determined?|tell|told|say|said|know|find|found)"
    r"|unknown|unanswerable)\b",
    re.IGNORECASE,
)


def abstains(prediction: str) -> bool:
    """Tell whether an answer says, in one of the usual phrases, that it is not known.

    >>> abstains("You did not mention a cat."), abstains("I don't know."), abstains("It is Tom.")
    (True, True, False)
    """
    return _ABSTAINS.search(prediction.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")) is not None
