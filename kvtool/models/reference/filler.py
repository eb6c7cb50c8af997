"""Filler: plain sentences about the words of the world, between which facts are hidden."""

import numpy as np

from kvtool.models.reference.vocabulary import (
    ADJECTIVES,
    ADVERBS,
    NAMES,
    NOUNS,
    PLACES,
    VERBS,
    digits,
    encode,
)

_TEMPLATES = [
    "The ADJ NOUN was near the PLACE.",
    "NAME VERB the ADJ NOUN ADV.",
    "NAME VERB a NOUN at the PLACE.",
    "In the morning, NAME VERB the NOUN.",
    "One evening, NAME and NAME VERB the NOUN behind the PLACE.",
    "There was a ADJ NOUN under the NOUN.",
    "Everyone knew that the NOUN of NAME was ADJ.",
    "When NAME VERB the NOUN, the PLACE was ADJ.",
    "NAME said that the NOUN was very ADJ.",
    "The NOUN by the PLACE was ADJ and ADJ.",
    "NAME counted NUM NOUN and VERB the ADJ NOUN.",
    "Nobody VERB the NOUN from the PLACE ADV.",
    "At night, the ADJ PLACE was ADJ.",
    "NUM years ago, NAME VERB the NOUN of NAME.",
    "NAME thought of the PLACE, but NAME VERB a NOUN.",
    "Some people at the PLACE VERB the NOUN with a NOUN.",
    "The NOUN was not in the PLACE, it was near the ADJ NOUN.",
    "NAME VERB it before NAME VERB the NOUN.",
]
_SLOTS = {
    "ADJ": ADJECTIVES,
    "NOUN": NOUNS,
    "VERB": VERBS,
    "NAME": NAMES,
    "PLACE": PLACES,
    "ADV": ADVERBS,
}
_LONGEST_NUMBER = 3
_MEAN_SENTENCE = 6  # a safe underestimate, in tokens: enough sentences are drawn at once


def _parse(template: str) -> list[str | list[int]]:
    """Split a template into slot names and the ids of the fixed words between them."""
    parts: list[str | list[int]] = []
    for word in template.replace(",", " ,").replace(".", " .").split():
        if word in _SLOTS or word == "NUM":
            parts.append(word)
        else:
            parts.append(encode(word if word in ",." else f" {word}"))
    return parts


_PARSED = [_parse(template) for template in _TEMPLATES]
_SLOT_IDS = {slot: [encode(f" {word}")[0] for word in words] for slot, words in _SLOTS.items()}


def _sentence(rng: np.random.Generator) -> list[int]:
    ids: list[int] = []
    for part in _PARSED[rng.integers(len(_PARSED))]:
        if isinstance(part, list):
            ids += part
        elif part == "NUM":
            ids += digits(rng, int(rng.integers(1, _LONGEST_NUMBER + 1)))
        else:
            ids.append(_SLOT_IDS[part][rng.integers(len(_SLOT_IDS[part]))])
    return ids


class Filler:
    """A fixed pool of sentences; another seed gives other sentences of the same grammar."""

    def __init__(self, seed: int, sentences: int = 30_000) -> None:
        rng = np.random.default_rng(seed)
        self._pool = [_sentence(rng) for _ in range(sentences)]

    def take(self, rng: np.random.Generator, tokens: int) -> list[list[int]]:
        """Draw sentences of at most `tokens` tokens in all."""
        taken = []
        for index in rng.integers(0, len(self._pool), max(4, tokens // _MEAN_SENTENCE + 4)):
            sentence = self._pool[index]
            if len(sentence) > tokens:
                break
            taken.append(sentence)
            tokens -= len(sentence)
        return taken
