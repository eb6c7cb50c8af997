"""Built-in texts for measurements that need no right answer: prose that looks back on itself.

Codes are hidden in the built-in haystack, in the words that the bundled reference model knows; a
recap, or a question, then needs them again. A cache that has lost them shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import starmap

import numpy as np

from kvtool.evaluation.samples import needles
from kvtool.evaluation.samples.fit import Rng, fit, generator
from kvtool.evaluation.samples.haystack import costs, haystack, insert
from kvtool.evaluation.samples.sample import Sample, TokenCounter, Turn
from kvtool.models.reference.vocabulary import NOUNS

_TOKENS_PER_CODE = 96
_ASKED = 4


def recap_passage(task: str, seed: int, length: int, index: int, tokens: TokenCounter) -> str:
    """Write a text of at most `length` tokens that ends with a recap of the codes in it.

    Args:
        task: its name, for the random numbers and errors.

    Raises:
        UsageError: `length` is too short.
    """
    rng = generator(seed, task, length, index)
    codes = _codes(rng, max(2, length // _TOKENS_PER_CODE))
    recap = [codes[i] for i in rng.permutation(len(codes))]
    turn = Turn("\n Recap:" + "".join(starmap(needles.state, recap)), (), 0)
    return _place(rng, codes, turn, length, tokens, task).context + turn.question


def question_sample(
    task: str, seed: int, length: int, index: int, tokens: TokenCounter, *, new_tokens: int
) -> Sample:
    """Write a text and a question about four of the codes in it.

    Args:
        length: tokens of the prompt and the longest answer together.
        new_tokens: of the longest answer.

    Raises:
        UsageError: `length` is too short.
    """
    text_length = max(length - new_tokens, 0)
    rng = generator(seed, task, text_length, index)
    codes = _codes(rng, max(_ASKED, text_length // _TOKENS_PER_CODE))
    asked = [codes[i] for i in rng.permutation(len(codes))[:_ASKED]]
    keys = ", ".join(key for key, _ in asked)
    turn = Turn(
        f"\n Question: What are the secret codes for {keys}? Answer:",
        (f" {', '.join(f'{key}: {code}' for key, code in asked)}.",),
        new_tokens,
        f" The secret codes for {keys} are",
    )
    return _place(rng, codes, turn, length, tokens, task)


def question_samples(
    task: str, seed: int, length: int, count: int, tokens: TokenCounter, *, new_tokens: int
) -> Iterator[Sample]:
    """Yield samples of one length, as `question_sample` writes them, each with its cell.

    Args:
        count: how many.
    """
    for index in range(count):
        sample = question_sample(task, seed, length, index, tokens, new_tokens=new_tokens)
        cell = {"length": length}
        yield Sample(f"length={length}/{index}", sample.context, sample.turns, cell)


def _codes(rng: Rng, count: int) -> list[tuple[str, str]]:
    keys = rng.choice(NOUNS, min(count, len(NOUNS)), replace=False).tolist()
    return [(key, str(rng.integers(10**4, 10**7))) for key in keys]


def _place(
    rng: Rng, codes: list[tuple[str, str]], turn: Turn, length: int, tokens: TokenCounter, task: str
) -> Sample:
    filler = haystack().draw(rng, length)
    depths = np.sort(rng.uniform(0, 100, len(codes))).tolist()
    stated = list(starmap(needles.state, codes))

    def build(count: int) -> Sample:
        text = "".join(insert(filler[:count], stated, depths, tokens))
        return Sample("", text, (turn,))

    return fit(build, costs(filler, tokens), length, tokens, task)
