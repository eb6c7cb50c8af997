"""Three ways to count tokens: the reference model's, whitespace words, and one that joins them."""

import re

from kvtool.evaluation.samples.sample import TokenCounter
from training.tokenizer import build_tokenizer

_REFERENCE = build_tokenizer()
_REFERENCE.model_max_length = 10**9  # long texts are only counted here


def _encode(text: str) -> list[int]:
    return _REFERENCE.encode(text, add_special_tokens=False)


def _words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def _marked(text: str) -> list[int]:
    """Like SentencePiece: a text by itself starts with a mark that it lacks inside a longer one."""
    return [0, *(len(piece) for piece in re.findall(r"\w+|[^\w\s]", text))]


def _no_text(ids: list[int]) -> str:
    raise NotImplementedError("only counting is tried")


REFERENCE = TokenCounter(_encode, _REFERENCE.decode, limit=8192)
WORDS = TokenCounter(_words, _no_text, special=0)
MARKED = TokenCounter(_marked, _no_text, special=2)
COUNTERS = {"reference": REFERENCE, "words": WORDS, "marked": MARKED}
