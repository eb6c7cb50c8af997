"""Needles, what they are called and how they are asked for.

The wording is that of the bundled reference model, for every model: plain English that a large
model answers too, and the only one that the reference model understands.

    The secret code for falcon: 7429103.
    Question: What is the secret code for falcon? Answer: The secret code for falcon: ..

Who lives in which city is a fact of one word, in the words of any language model.

    Priya now lives in the city of Lisbon.
    Question: In which city does Priya live now? Answer: Priya now lives in the city of ..
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from kvtool.errors import KvtoolError
from kvtool.evaluation.samples.fit import Rng
from kvtool.evaluation.samples.sample import Turn
from kvtool.models.reference.vocabulary import ADJECTIVES, NOUNS

DIGITS = 7  # as in RULER


def draw_keys(rng: Rng, count: int) -> list[str]:
    """Draw different keys: nouns, or with one adjective or two, as soon as nouns do not suffice.

    Raises:
        KvtoolError: more than there are.
    """
    for adjectives in range(3):
        names = len(NOUNS) * len(ADJECTIVES) ** adjectives
        if count <= names:
            drawn = rng.choice(names, count, replace=False).tolist()
            return [_name(index, adjectives) for index in drawn]
    raise KvtoolError(f"{count} needles are more than the {names} keys there are")


def _name(index: int, adjectives: int) -> str:
    words: list[str] = []
    for _ in range(adjectives):
        index, adjective = divmod(index, len(ADJECTIVES))
        words.append(ADJECTIVES[adjective])
    return " ".join([*words, NOUNS[index]])


def draw_numbers(rng: Rng, count: int, digits: int = DIGITS) -> list[str]:
    """Draw different numbers of `digits` digits, the first not 0."""
    smallest = 10 ** (digits - 1)
    drawn = rng.choice(9 * smallest, count, replace=False)
    return [str(smallest + number) for number in drawn.tolist()]


def draw_uuids(rng: Rng, count: int) -> list[str]:
    """Draw random UUIDs (version 4)."""
    return [str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(count)]


def state(key: str, value: str) -> str:
    """State the value of a key: a needle.

    >>> state("falcon", "7429103")
    ' The secret code for falcon: 7429103.'
    """
    return f" The secret code for {key}: {value}."


def ask(keys: Sequence[str], values: Sequence[str], max_new_tokens: int) -> Turn:
    """Ask for all `values` of the `keys`: one value, several of one key, or one of each key.

    >>> ask(["owl", "lamp"], ["1234567", "7654321"], 128).question
    '\\n Question: What are the secret codes for owl, lamp? Answer:'
    """
    asked = ", ".join(keys)
    if len(values) == 1:
        what, opening = f"What is the secret code for {asked}", f" The secret code for {asked}:"
    elif len(keys) == 1:
        what, opening = f"What are the secret codes for {asked}", f" The secret codes for {asked}:"
    else:
        what, opening = (
            f"What are the secret codes for {asked}",
            f" The secret codes for {asked} are",
        )
    return Turn(f"\n Question: {what}? Answer:", tuple(values), max_new_tokens, opening)


_HOME_TOKENS = 16

NAMES = (
    *("Amir", "Bianca", "Bruno", "Carlos", "Chloe", "Darius", "Diego", "Dmitri", "Elena"),
    *("Fatima", "Felix", "Gustavo", "Hassan", "Hiroshi", "Hugo", "Igor", "Ingrid", "Ivan"),
    *("Kevin", "Lars", "Leila", "Luca", "Marco", "Mateo", "Miguel", "Nadia", "Nina", "Olga"),
    *("Omar", "Oscar", "Pablo", "Pedro", "Priya", "Rashid", "Ravi", "Samir", "Sergei", "Sonia"),
    *("Tariq", "Viktor", "Wanda", "Xavier", "Yasmin", "Yuki", "Yusuf", "Zoe"),
)
CITIES = (
    *("Amsterdam", "Athens", "Atlanta", "Austin", "Baghdad", "Bangkok", "Barcelona", "Beijing"),
    *("Berlin", "Boston", "Brussels", "Budapest", "Cairo", "Chicago", "Copenhagen", "Dallas"),
    *("Delhi", "Denver", "Detroit", "Dublin", "Hamburg", "Havana", "Helsinki", "Houston"),
    *("Istanbul", "Jakarta", "Lisbon", "Madrid", "Manila", "Melbourne", "Miami", "Milan"),
    *("Montreal", "Moscow", "Mumbai", "Munich", "Nairobi", "Oslo", "Philadelphia", "Phoenix"),
    *("Prague", "Seattle", "Seoul", "Shanghai", "Stockholm", "Sydney", "Tehran", "Tokyo"),
    *("Toronto", "Vancouver", "Vienna", "Warsaw"),
)


def draw_home(rng: Rng) -> tuple[str, str]:
    """Draw a name and a city."""
    return NAMES[rng.integers(len(NAMES))], CITIES[rng.integers(len(CITIES))]


def state_home(name: str, city: str) -> str:
    """State where a person lives.

    >>> state_home("Priya", "Lisbon")
    ' Priya now lives in the city of Lisbon.'
    """
    return f" {name} now lives in the city of {city}."


def ask_home(name: str, city: str) -> Turn:
    """Ask where a person lives.

    >>> ask_home("Priya", "Lisbon").question
    '\\n Question: In which city does Priya live now? Answer:'
    """
    question = f"\n Question: In which city does {name} live now? Answer:"
    return Turn(question, (city,), _HOME_TOKENS, f" {name} now lives in the city of")
