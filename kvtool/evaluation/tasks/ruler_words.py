"""RULER's word counting: the words that a long list holds most often.

Hsieh et al., 2024, https://arxiv.org/abs/2404.06654, section 3.3; see `Ruler` for what is our own.
The words to count are lower-case nouns, adjectives and verbs of the bundled reference model, and
made-up words of three syllables as well where those do not suffice. None is a part of another, so
that the score mistakes none for another. Neither task is one that the reference model can do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from kvtool.errors import KvtoolError
from kvtool.evaluation.samples.fit import needed_tokens
from kvtool.evaluation.samples.sample import Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import Cell, Draft, Rng, Ruler, length_of
from kvtool.models.reference.vocabulary import ADJECTIVES, NOUNS, VERBS

_COMMON = 10
_COMMON_TOKENS, _FREQUENT_TOKENS = 120, 50  # of an answer
_LONG = 4096  # from here on RULER repeats words more often and we show a worked example
_EXAMPLE_WORDS, _EXAMPLE_TIMES = 40, (10, 3)
_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_DOTS = "..."
_CODE_LETTERS = 6
_ASKED = slice(1, 4)  # ranks 2 to 4: the most frequent word is dots
_FEWEST = 27  # coded words, one of them of rank 4: 27 / 4^2 / zeta(2) is just above 1
_ZETA_2 = math.pi**2 / 6


class CommonWords(Ruler):
    """`cwe`: name the ten words of a numbered list that occur more often than the others.

    A worked example comes first, from 4096 tokens on and if the common words still fit.
    """

    def draft(self, rng: Rng, cell: Cell, tokens: TokenCounter) -> Draft:
        """Draw a list, of made-up words as well if it is longer than the others make it."""
        length = length_of(cell)
        seldom = _times(length)[1]
        most = known = len(_known_words())
        build = _list_builder(rng, length, draw_words(rng, known))
        if needed_tokens(Sample("", *build(known, False)), tokens) <= length:
            most = length // (seldom * (tokens.count(" 1. a" * 100) // 100)) + 1
            build = _list_builder(rng, length, draw_words(rng, most))
        example = length >= _LONG and needed_tokens(Sample("", *build(0, True)), tokens) <= length
        return Draft(lambda n: build(n, example), [seldom] * most, {"example": example})


def _times(length: int) -> tuple[int, int]:
    """Return how often common words and others occur."""
    return (30, 3) if length >= _LONG else (6, 1)


def _list_builder(
    rng: Rng, length: int, words: list[str]
) -> Callable[[int, bool], tuple[str, tuple[Turn, ...]]]:
    """Return what lists the common words and the first n others, with an example or without."""
    often, seldom = _times(length)
    shown, words = words[:_EXAMPLE_WORDS], words[_EXAMPLE_WORDS:]
    common, others = words[:_COMMON], words[_COMMON:]
    worked = _example(rng, shown)
    order = int(rng.integers(2**32))
    question, cue = _common_question()
    turn = Turn(question, tuple(common), _COMMON_TOKENS, cue)

    def build(count: int, example: bool) -> tuple[str, tuple[Turn, ...]]:
        listed = _shuffled(order, common, often, others[:count], seldom)
        return worked + listed if example else listed, (turn,)

    return build


def _example(rng: Rng, words: list[str]) -> str:
    often, seldom = _EXAMPLE_TIMES
    order = int(rng.integers(2**32))
    listed = _shuffled(order, words[:_COMMON], often, words[_COMMON:], seldom)
    return listed + "".join(_common_question()) + _numbered(words[:_COMMON]) + "\n"


def _common_question() -> tuple[str, str]:
    asked = f"the {_COMMON} most common words"
    return f"\n Question: What are {asked}? Answer:", f" T{asked[1:]} are:"


def _shuffled(order: int, common: list[str], often: int, others: list[str], seldom: int) -> str:
    entries = common * often + others * seldom
    return " Words:" + _numbered(np.random.default_rng(order).permutation(entries).tolist())


def _numbered(words: list[str]) -> str:
    return "".join(f" {number}. {word}" for number, word in enumerate(words, 1))


def draw_words(rng: Rng, count: int) -> list[str]:
    """Draw different words, made-up ones among them only if there are too few others.

    Raises:
        KvtoolError: more than there are.
    """
    words = _known_words()
    if count > len(words):
        part_of = re.compile("|".join(words))
        words = words + _made_up(rng, count - len(words), part_of)
    return rng.permutation(words).tolist()[:count]


@lru_cache(maxsize=1)
def _known_words() -> list[str]:
    words = list(dict.fromkeys(NOUNS + ADJECTIVES + VERBS))
    return [a for a in words if not any(a != b and (a in b or b in a) for b in words)]


def _made_up(rng: Rng, count: int, avoided: re.Pattern[str]) -> list[str]:
    size = len(_SYLLABLES)
    found: list[str] = []
    for index in rng.permutation(size**3).tolist():
        if len(found) == count:
            return found
        word = "".join(_SYLLABLES[index // size**place % size] for place in range(3))
        if not avoided.search(word):
            found.append(word)
    raise KvtoolError(f"{count} made-up words are more than the {len(found)} there are")


class FrequentWords(Ruler):
    """`fwe`: name the three most frequent of coded words, whose frequencies follow Zipf's law.

    The k-th of length / 50 words makes up a fraction k^-2 / zeta(2); the first is dots and not
    asked for. The list is never so long that the fourth and fifth are equally frequent.
    """

    def draft(self, rng: Rng, cell: Cell, tokens: TokenCounter) -> Draft:
        length = length_of(cell)
        words = [_DOTS, *_codes(rng, max(length // 50, _ASKED.stop) - 1)]
        order = int(rng.integers(2**32))
        asked = "three most common words"
        turn = Turn(
            f"\n Question: What are the {asked}, dots left out? Answer:",
            tuple(words[_ASKED]),
            _FREQUENT_TOKENS,
            f" The {asked} are:",
        )

        def build(count: int) -> tuple[str, tuple[Turn, ...]]:
            counts = frequencies(_FEWEST + count, len(words))
            listed = np.random.default_rng(order).permutation(np.repeat(words, counts))
            return f" Words: {' '.join(listed)}", (turn,)

        return Draft(build, [tokens.count(f" {words[1]}")] * (length + len(words)))


def _codes(rng: Rng, count: int) -> list[str]:
    codes: dict[str, None] = {}
    while len(codes) < count:
        codes["".join(_LETTERS[i] for i in rng.integers(0, len(_LETTERS), _CODE_LETTERS))] = None
    return list(codes)


def frequencies(total: int, ranks: int) -> list[int]:
    """Return how often each rank occurs among about `total` words.

    With a tie of ranks 4 and 5, that of the next smaller total without one.

    >>> frequencies(100, 6)
    [60, 15, 6, 3, 2, 1]
    """
    while True:
        counts = [int(total / rank**2 / _ZETA_2) for rank in range(1, max(ranks, 5) + 1)]
        if counts[3] > counts[4]:
            return counts[:ranks]
        total -= 1
