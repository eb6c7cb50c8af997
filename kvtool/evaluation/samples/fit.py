"""Samples of a given length: as much filler as the tokenizer allows.

The length is that of the prompt and the longest answer together, as in RULER
(https://arxiv.org/abs/2404.06654, section 3): `special` + context + question + beginning of the
answer + `max_new_tokens`. It is checked on the whole text, since tokens may join across the parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from kvtool.errors import UsageError
from kvtool.evaluation.samples.sample import Sample, TokenCounter

Rng = np.random.Generator


def generator(seed: int, *place: str | int | float) -> Rng:
    """Return the random numbers of one sample, whatever other samples are drawn.

    Args:
        place: what identifies the sample: name of the task, length, cell, index.
    """
    digest = hashlib.sha256(repr(place).encode()).digest()
    return np.random.default_rng([seed, *np.frombuffer(digest, np.uint32).tolist()])


def needed_tokens(sample: Sample, tokens: TokenCounter) -> int:
    """Return the tokens of the prompt, special ones and the longest answer included."""
    turn = sample.turns[0]
    prompt = sample.context + turn.question + turn.answer_prefix
    return tokens.special + tokens.count(prompt) + turn.max_new_tokens


def fit(
    build: Callable[[int], Sample],
    weights: Sequence[int],
    length: int,
    tokens: TokenCounter,
    task: str,
) -> Sample:
    """Return the sample with the most units of filler that needs at most `length` tokens.

    Args:
        build: a sample with the first n units (sentences, needles, words ..) as its filler.
        weights: tokens of each unit, roughly: where to look first. No more units are used.
        task: its name, for the error.

    Raises:
        UsageError: the sample is too long even without filler.
    """
    least = needed_tokens(build(0), tokens)
    if least > length:
        raise UsageError(
            f"{task}: length {length} is too short, a sample takes {least} tokens without filler",
            hint=f"use lengths of {least} or more",
        )
    return build(longest(lambda n: needed_tokens(build(n), tokens), weights, length))


def longest(used: Callable[[int], int], weights: Sequence[int], limit: int) -> int:
    """Return the most units whose true size is within `limit`, measuring as rarely as possible.

    The size is exact where it says that the units fit; that one more would not is read from
    `weights`, scaled to what was measured.

    Args:
        used: the true size with the first n units; with none it is within `limit`.
        weights: rough size of each unit.
    """
    sums = np.concatenate([[0], np.cumsum(np.asarray(weights, dtype=np.int64))])
    none = used(0)
    fits, too_many = 0, len(sums)
    last, size, rate = 0, none, 1.0
    while too_many - fits > 1:
        if last > 0 and size > none:
            rate = (size - none) / int(sums[last])
        target = sums[last] + (limit - size) / rate
        guess = int(np.searchsorted(sums, target, side="right")) - 1
        if fits > 0 and last == fits == guess:
            break
        last = min(max(guess, fits + 1), too_many - 1)
        size = used(last)
        if size <= limit:
            fits = last
        else:
            too_many = last
    return fits
