"""Facts of one word: who lives in which city, in the words of any language model.

Priya now lives in the city of Lisbon.
Question: In which city does Priya live now? Answer: Priya now lives in the city of ..
"""

from __future__ import annotations

import numpy as np

from kvtool.evaluation.samples.sample import Turn

_NEW_TOKENS = 16

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


def draw_fact(rng: np.random.Generator) -> tuple[str, str]:
    """Draw a name and a city."""
    return NAMES[rng.integers(len(NAMES))], CITIES[rng.integers(len(CITIES))]


def state(name: str, city: str) -> str:
    """State where a person lives.

    >>> state("Priya", "Lisbon")
    ' Priya now lives in the city of Lisbon.'
    """
    return f" {name} now lives in the city of {city}."


def ask(name: str, city: str) -> Turn:
    """Ask where a person lives.

    >>> ask("Priya", "Lisbon").question
    '\\n Question: In which city does Priya live now? Answer:'
    """
    question = f"\n Question: In which city does {name} live now? Answer:"
    return Turn(question, (city,), _NEW_TOKENS, f" {name} now lives in the city of")
