"""The facts of the world and the questions about them, as token ids.

A fact puts its answer directly after the word that is asked for, so that one match finds it:

    The secret code for falcon: 7429103.     The route from BA: CE.
    The hidden word for lamp: harbor.        The value 48213: BA.
    The secret phrase for plum: piano owl.   The value from BA: CE.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from kvtool.models.reference.vocabulary import (
    KEYS,
    NOUNS,
    TOKEN_ID,
    VARIABLES,
    digits,
    encode,
)

NOUN_IDS = np.array([TOKEN_ID[f" {noun}"] for noun in NOUNS])
VARIABLE_IDS = np.array([TOKEN_ID[f" {name}"] for name in VARIABLES])
WITH_COLON = {TOKEN_ID[f" {key}"]: TOKEN_ID[f" {key}:"] for key in KEYS}
STOP, COMMA, COLON = encode(".")[0], encode(",")[0], encode(":")[0]
LONGEST_PHRASE = 3

_DIGIT_IDS = {TOKEN_ID[f" {digit}"] for digit in range(10)}
_ASK = encode("\n Question:")
_ANSWER = encode("? Answer:")
_ARE = encode(" are")
_ROUTE = encode(" The route from")
_VALUE = encode(" The value")
_VALUE_FROM = encode(" The value from")
_WHAT_STOPS, _STOPS = encode(" What are the stops after"), encode(" The stops after")
_WHICH_VARIABLES = encode(" Which variables have the value")
_VARIABLES = encode(" The variables with the value")
_KINDS = {
    kind: {
        "one": encode(f" The {kind} for"),
        "what": encode(f" What is the {kind} for"),
        "all": encode(f" The {kind}s for"),
        "what all": encode(f" What are the {kind}s for"),
    }
    for kind in ("secret code", "hidden word")
}
_KINDS["secret phrase"] = {
    "one": encode(" The secret phrase for"),
    "what": encode(" What is the secret phrase for"),
}


@dataclass(frozen=True)
class Question:
    """A question up to its answer's prefix, and the answer with its full stop, as ids."""

    prompt: list[int]
    answer: list[int]


def code(rng: np.random.Generator, shortest: int = 5, longest: int = 7) -> list[int]:
    """Draw a number of `shortest` to `longest` digits."""
    return digits(rng, int(rng.integers(shortest, longest + 1)))


def nouns(rng: np.random.Generator, longest: int = 1) -> list[int]:
    """Draw one to `longest` different nouns."""
    count = int(rng.integers(1, longest + 1))
    return rng.choice(NOUN_IDS, count, replace=False).tolist()


def _kind(value: list[int]) -> dict[str, list[int]]:
    if value[0] in _DIGIT_IDS:
        return _KINDS["secret code"]
    return _KINDS["hidden word" if len(value) == 1 else "secret phrase"]


def _comma_list(parts: list[list[int]]) -> list[int]:
    first, *rest = parts
    return first + [token for part in rest for token in (COMMA, *part)]


def needle(key: int, value: list[int]) -> list[int]:
    """State the value of a key."""
    return [*_kind(value)["one"], WITH_COLON[key], *value, STOP]


def ask_value(key: int, value: list[int]) -> Question:
    """Ask for the one value of a key."""
    kind = _kind(value)
    prompt = [*_ASK, *kind["what"], key, *_ANSWER, *kind["one"], WITH_COLON[key]]
    return Question(prompt, [*value, STOP])


def ask_all_values(key: int, values: list[list[int]]) -> Question:
    """Ask for all values of a key that was given several, in the order they were given."""
    kind = _kind(values[0])
    prompt = [*_ASK, *kind["what all"], key, *_ANSWER, *kind["all"], WITH_COLON[key]]
    return Question(prompt, [*_comma_list(values), STOP])


def ask_several_keys(keys: list[int], values: list[list[int]]) -> Question:
    """Ask for the values of several keys, all of one kind, in one question."""
    kind, asked = _kind(values[0]), _comma_list([[key] for key in keys])
    prompt = [*_ASK, *kind["what all"], *asked, *_ANSWER, *kind["all"], *asked, *_ARE]
    pairs = [[WITH_COLON[key], *value] for key, value in zip(keys, values, strict=True)]
    return Question(prompt, [*_comma_list(pairs), STOP])


def route(names: list[int]) -> list[list[int]]:
    """State a route hop by hop, one sentence each."""
    hops = itertools.pairwise(names)
    return [[*_ROUTE, WITH_COLON[start], end, STOP] for start, end in hops]


def ask_route(names: list[int]) -> Question:
    """Ask for every stop after the first name of a route."""
    prompt = [*_ASK, *_WHAT_STOPS, names[0], *_ANSWER, *_STOPS, WITH_COLON[names[0]]]
    return Question(prompt, [*names[1:], STOP])


def _value_with_colon(value: list[int]) -> list[int]:
    if value[0] in _DIGIT_IDS:
        return [*value, COLON]
    return [WITH_COLON[value[0]]]


def assignments(value: list[int], names: list[int]) -> list[list[int]]:
    """State that a value goes to the first name and from each name on to the next."""
    hops = itertools.pairwise(names)
    first = [*_VALUE, *_value_with_colon(value), names[0], STOP]
    return [first, *([*_VALUE_FROM, WITH_COLON[source], to, STOP] for source, to in hops)]


def ask_variables(value: list[int], names: list[int]) -> Question:
    """Ask, by value, for all the variables that hold it."""
    asked = [*_WHICH_VARIABLES, *value]
    prompt = [*_ASK, *asked, *_ANSWER, *_VARIABLES, *_value_with_colon(value)]
    return Question(prompt, [*names, STOP])


def scatter(
    rng: np.random.Generator, filler: list[list[int]], groups: list[list[list[int]]]
) -> list[tuple[list[int], bool]]:
    """Put facts at random places between filler sentences; a group keeps its order.

    Returns:
        The sentences in order, each with whether it is a fact.
    """
    labels = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    rng.shuffle(labels)
    places = np.sort(rng.integers(0, len(filler) + 1, len(labels)))
    remaining = [iter(group) for group in groups]
    sentences: list[tuple[list[int], bool]] = []
    done = 0
    for place, label in zip(places, labels, strict=True):
        sentences += [(sentence, False) for sentence in filler[done:place]]
        sentences.append((next(remaining[label]), True))
        done = int(place)
    return sentences + [(sentence, False) for sentence in filler[done:]]
