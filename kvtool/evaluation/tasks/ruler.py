"""RULER's tasks without data: eight of needles, variable tracking, and word counting.

Hsieh et al., 2024, https://arxiv.org/abs/2404.06654; see `Ruler` for what is our own.

Needles (section 3.1): one needle or several, in noise, in prose or among needles. RULER's essays
are replaced by built-in sentences or the user's text. A haystack of needles grows needle by needle.
All its keys have the same form, so that at lengths with more needles than nouns there are
adjectives in all of them. Depths are drawn from 40 equally spaced ones everywhere. The bundled
reference model was not taught UUIDs (niah_single_3, niah_multikey_3) nor keys of two words
(niah_multikey_2 from about 2,400 tokens on): its scores there say little about a cache.

Variable tracking (section 3.2): the answer is all variables that hold a value, which is handed on
from one to the next in one chain of four hops in noise. The wording asks for no calculation, so
there is no worked example before it. Names have two letters (five in RULER), which other words may
contain: they must be words of the answer, in capitals.

Word counting (section 3.3): the words that a long list holds most often. They are lower-case nouns,
adjectives and verbs of the bundled reference model, and made-up words of three syllables as well
where those do not suffice. None is a part of another, so that the score mistakes none for another.
Neither task is one that the reference model can do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from kvtool.errors import KvtoolError
from kvtool.evaluation.metrics.text import words_match_all
from kvtool.evaluation.samples import needles
from kvtool.evaluation.samples.fit import Rng, needed_tokens
from kvtool.evaluation.samples.haystack import costs, haystack, insert, samples_version
from kvtool.evaluation.samples.random_data import assignments
from kvtool.evaluation.samples.sample import Json, Sample, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import Cell, Draft, Ruler, length_of
from kvtool.models.reference.vocabulary import ADJECTIVES, NOUNS, VARIABLES, VERBS

_NEW_TOKENS = 128
_DEPTHS = np.linspace(0, 100, 40)
_TRIED = 16


_Draw = Callable[[Rng, int], list[str]]


@dataclass(frozen=True)
class Form:
    """What one task hides: `keys` with `values` each; the first `queries` keys are asked for."""

    haystack: Literal["noise", "prose", "needles"]
    keys: int = 1
    values: int = 1
    queries: int = 1
    draw_keys: _Draw = needles.draw_keys
    draw_values: _Draw = needles.draw_numbers

    def state(self, rng: Rng, count: int) -> tuple[list[str], list[str], list[str]]:
        """Draw `count` keys and their values, and state each value."""
        keys = self.draw_keys(rng, count)
        values = self.draw_values(rng, count * self.values)
        stated = [needles.state(keys[i // self.values], value) for i, value in enumerate(values)]
        return keys, values, stated


FORMS = {
    "niah_single_1": Form("noise"),
    "niah_single_2": Form("prose"),
    "niah_single_3": Form("prose", draw_values=needles.draw_uuids),
    "niah_multikey_1": Form("prose", keys=4),
    "niah_multikey_2": Form("needles"),
    "niah_multikey_3": Form(
        "needles", draw_keys=needles.draw_uuids, draw_values=needles.draw_uuids
    ),
    "niah_multivalue": Form("prose", values=4),
    "niah_multiquery": Form("prose", keys=4, queries=4),
}


class RulerNeedles(Ruler):
    """Find the values of one key or several.

    Attributes:
        haystack: prose for the tasks that RULER puts into essays: `builtin` or a text file.
    """

    haystack: str = "builtin"

    @property
    def version(self) -> int:
        return samples_version(self.haystack)

    def draft(self, rng: Rng, cell: Cell, tokens: TokenCounter) -> Draft:
        form, length = FORMS[self.name.removeprefix("ruler/")], length_of(cell)
        others = _most_needles(rng, form, length, tokens) if form.haystack == "needles" else 0
        keys, values, stated = form.state(rng, form.keys + others)
        planted = form.keys * form.values
        asked = needles.ask(keys[: form.queries], values[: form.queries * form.values], _NEW_TOKENS)
        depths = rng.choice(_DEPTHS, planted, replace=False).tolist()
        if form.haystack == "needles":
            filler = stated[planted:]
            weights = [1] * len(filler)
        else:
            source = "noise" if form.haystack == "noise" else self.haystack
            filler = haystack(source).draw(rng, length)
            weights = costs(filler, tokens)

        def build(count: int) -> tuple[str, Sequence[Turn]]:
            return "".join(insert(filler[:count], stated[:planted], depths, tokens)), [asked]

        return Draft(build, weights)


def _most_needles(rng: Rng, form: Form, length: int, tokens: TokenCounter) -> int:
    """Return a tenth more needles than would fit, were all like some that are tried."""
    _, _, tried = form.state(rng, _TRIED)
    return 11 * length * _TRIED // (10 * tokens.count("".join(tried)))


_HOPS = 4
_TRACING_TOKENS = 30
_SMALLEST, _LARGEST = 10_000, 99_998


class VariableTracking(Ruler):
    """Name the five variables that hold a value."""

    def draft(self, rng: Rng, cell: Cell, tokens: TokenCounter) -> Draft:
        value = int(rng.integers(_SMALLEST, _LARGEST + 1))
        names = rng.choice(VARIABLES, _HOPS + 1, replace=False).tolist()
        depths = np.sort(rng.uniform(0, 100, len(names))).tolist()
        noise = haystack("noise").draw(rng, length_of(cell))
        turn = Turn(
            f"\n Question: Which variables have the value {value}? Answer:",
            tuple(names),
            _TRACING_TOKENS,
            f" The variables with the value {value}:",
        )

        def build(count: int) -> tuple[str, Sequence[Turn]]:
            text = insert(noise[:count], assignments(value, names), depths, tokens)
            return "".join(text), [turn]

        return Draft(build, costs(noise, tokens))

    def score_answer(self, prediction: str, references: Sequence[str], facts: Json) -> float:
        """Return the percentage of names that are words of the answer."""
        return 100 * words_match_all(prediction, references)


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
