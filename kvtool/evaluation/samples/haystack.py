"""Haystacks: sentences of any total length, and needles put between them at given depths.

Essays are copyrighted, so none are shipped. The built-in text is the grammar of the bundled
reference model: plain English sentences without a thread, other ones than it was trained on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from kvtool.documents.files import expand, read_bytes
from kvtool.errors import UsageError, did_you_mean
from kvtool.evaluation.samples.fit import Rng, longest
from kvtool.evaluation.samples.sample import TokenCounter
from kvtool.models.reference.filler import Filler
from kvtool.models.reference.vocabulary import decode

_SEED = 3  # training draws from seed 1, the model's own measurement from seed 2
_POOL_TOKENS = 60_000  # of the built-in text, about 5,900 sentences to draw from
_SHORTEST_SENTENCE = 2  # a safe underestimate, in tokens: enough sentences are drawn at once
_NOISE = (
    " The old lantern was near the station.",
    " Anna carried a basket at the market.",
    " At night, the small village was quiet.",
    " In the morning, Peter painted the ladder.",
    " Nobody followed the river from the tower slowly.",
)
_SENTENCE = re.compile(
    r"""\s*\S.*?(?:[.!?]['")\]\u2019\u201d]*(?=\s)|[\u3002\uff01\uff1f]|(?=\n\s*\n)|\Z)""",
    re.DOTALL,
)


@dataclass(frozen=True, eq=False)
class Haystack:
    """Sentences to hide needles in.

    Attributes:
        name: `builtin`, `noise`, or the user's file.
        pool: each sentence with the white space before it, so that they are simply joined.
        shuffled: drawn at random with repeats, instead of in order; the first follows the last.
        own: whether it is the user's text; each sample then begins at a drawn sentence.
    """

    name: str
    pool: tuple[str, ...] = field(repr=False)
    shuffled: bool
    own: bool = False

    def draw(self, rng: Rng, tokens: int) -> list[str]:
        """Return more than enough sentences for `tokens` tokens, whatever the tokenizer."""
        count, size = tokens // _SHORTEST_SENTENCE + 1, len(self.pool)
        if self.shuffled:
            return [self.pool[index] for index in rng.integers(0, size, count)]
        first = int(rng.integers(size)) if self.own else 0
        return [self.pool[index % size] for index in range(first, first + count)]

    def sentences(self, rng: Rng, tokens: int, counter: TokenCounter) -> list[str]:
        """Return the sentences that, joined, come nearest to `tokens` tokens from below."""
        drawn = self.draw(rng, tokens)
        count = longest(lambda n: counter.count("".join(drawn[:n])), costs(drawn, counter), tokens)
        return drawn[:count]


def samples_version(source: str) -> int:
    """Return the version of the samples of a task that hides something in a haystack.

    It is 2 where that is the user's text: in version 1 each sample began with its first sentence.
    """
    return 1 if source in ("builtin", "noise") else 2


def haystack(source: str = "builtin") -> Haystack:
    """Return a haystack: `builtin`, `noise` (five sentences over and over) or a text file.

    Raises:
        UsageError: no such file, or one that holds no text.
    """
    if source == "builtin":
        return _builtin()
    if source == "noise":
        return Haystack("noise", _NOISE, shuffled=False)
    return _from_text(source, _read(source))


@lru_cache(maxsize=1)
def _builtin() -> Haystack:
    drawn = Filler(_SEED).take(np.random.default_rng(_SEED), _POOL_TOKENS)
    return Haystack("builtin", tuple(dict.fromkeys(map(decode, drawn))), shuffled=True)


@lru_cache(maxsize=2)
def _from_text(name: str, text: str) -> Haystack:
    return Haystack(name, tuple(split_sentences(text)), shuffled=False, own=True)


def _read(source: str) -> str:
    try:
        text = read_bytes(expand(source), f"haystack `{source}`").decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(
            f"haystack `{source}` is neither builtin nor noise, nor is there such a file",
            hint=did_you_mean(source, ["builtin", "noise"]),
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read haystack `{source}` as UTF-8: {error}") from None
    if not text.strip():
        raise UsageError(f"haystack `{source}` is empty", hint="give it at least one sentence")
    return text


def split_sentences(text: str) -> list[str]:
    r"""Split prose after `.`, `!` and `?` before white space, and at blank lines.

    Joined, the sentences are the text again, one space in front and no white space at its end.

    >>> split_sentences('He left. "Why?" Nobody\nknew 3.5 reasons!')
    [' He left.', ' "Why?"', ' Nobody\nknew 3.5 reasons!']
    """
    return _SENTENCE.findall(f" {text.strip()}")


def costs(sentences: Sequence[str], counter: TokenCounter) -> list[int]:
    """Return the tokens of each sentence by itself; one seen before is not tokenized again."""
    return [_cost(counter, sentence) for sentence in sentences]


@lru_cache(maxsize=2**17)
def _cost(counter: TokenCounter, text: str) -> int:
    return counter.count(text)


def insert(
    sentences: Sequence[str], needles: Sequence[str], depths: Sequence[float], counter: TokenCounter
) -> list[str]:
    """Put needles between sentences.

    Args:
        depths: for each needle, the percentage of the haystack's tokens that come before it: 0 is
            before the first sentence, 100 after the last. It is rounded up to the next sentence.
            Needles at the same depth keep their order.
    """
    passed = np.concatenate([[0], np.cumsum(np.array(costs(sentences, counter), dtype=np.int64))])
    places = np.searchsorted(100 * passed, np.array(depths) * passed[-1], side="left")
    result: list[str] = []
    done = 0
    for index in np.argsort(depths, kind="stable"):
        result += [*sentences[done : places[index]], needles[index]]
        done = int(places[index])
    return result + list(sentences[done:])
