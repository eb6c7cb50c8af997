"""What a reasoning model says, apart from what it thinks between `<think>` and `</think>`."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def split_thought(prediction: str) -> tuple[str, str | None]:
    """Split an answer into the thought and what is said after it.

    A tag that a chat template has opened before the answer need not stand in it.

    Returns:
        The thought, empty if there is none, and the rest, None if the thought never ends.

    >>> split_thought("<think>2 + 2</think> 4"), split_thought("4"), split_thought("<think>2 +")
    (('<think>2 + 2', ' 4'), ('', '4'), ('<think>2 +', None))
    """
    thought, closed, said = prediction.rpartition(CLOSE)
    if closed:
        return thought, said
    return (prediction, None) if OPEN in prediction else ("", prediction)


def said(prediction: str) -> str:
    """Return what is said after thinking, nothing if the thought never ends."""
    return split_thought(prediction)[1] or ""
