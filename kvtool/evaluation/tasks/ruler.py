"""RULER's eight needle tasks and its variable tracking.

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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvtool.evaluation.metrics.text import words_match_all
from kvtool.evaluation.samples import needles
from kvtool.evaluation.samples.haystack import costs, haystack, insert, samples_version
from kvtool.evaluation.samples.random_data import assignments
from kvtool.evaluation.samples.sample import Json, TokenCounter, Turn
from kvtool.evaluation.tasks.asking import Cell, Draft, Rng, Ruler, length_of
from kvtool.models.reference.vocabulary import VARIABLES

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
