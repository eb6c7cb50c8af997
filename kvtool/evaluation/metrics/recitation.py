"""How much of a text an answer recites, as OpenAI's MRCR scores it.

https://huggingface.co/datasets/openai/mrcr. The ratio is that of difflib, which in texts of 200
characters and more takes those that make up over 1 % of the second text for junk.
"""

from __future__ import annotations

from difflib import SequenceMatcher


def recited(prediction: str, reference: str, prefix: str) -> float:
    """Return how alike an answer and a text are, from 0 to 1; 0 if it lacks the prefix asked for.

    White space before the answer is passed over, which an interface for chats would have stripped.

    >>> recited(" Xy7abcd", "Xy7abcf", "Xy7"), recited("abcd", "Xy7abcd", "Xy7")
    (0.75, 0.0)
    """
    said = prediction.lstrip()
    if not said.startswith(prefix):
        return 0.0
    return SequenceMatcher(None, said.removeprefix(prefix), reference.removeprefix(prefix)).ratio()
