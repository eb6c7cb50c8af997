"""Frequent words: a long list of nouns, and the question which three occur most."""

import numpy as np

from kvtool.models.reference.facts import COMMA, NOUN_IDS, STOP, Question
from kvtool.models.reference.vocabulary import encode

HEAD = encode(" Words:")
PROMPT = encode(
    "\n Question: What are the three most common words? Answer: The three most common words are"
)
_ASKED = 35  # tokens of a question and its answer
_ASKED = 3
# of each word after the first: a row has few of them, and each takes the whole list to know
_WORD_WEIGHT = 5.0


def draw_list(
    rng: np.random.Generator, tokens: int, distinct: int, exponent: float
) -> tuple[np.ndarray, np.ndarray]:
    """Draw words whose frequencies fall as rank to the power of -`exponent`.

    Returns:
        ids of the `distinct` words; for each token of the list, the index of its word.
    """
    words = rng.choice(NOUN_IDS, distinct, replace=False)
    share = 1.0 / np.arange(1, distinct + 1) ** exponent
    return words, rng.choice(distinct, tokens, p=share / share.sum())


def ask_frequent(
    words: np.ndarray, counts: np.ndarray, prompt: list[int] = PROMPT, asked: int = _ASKED
) -> tuple[Question, list[float]]:
    """Ask for the most common words so far.

    Returns:
        The question, and a weight for each answer token: 0 for a word tied with the next.
    """
    order = np.argsort(-counts, kind="stable")[: asked + 1]
    answer: list[int] = []
    weights: list[float] = []
    for rank in range(asked):
        answer += [COMMA] * (rank > 0) + [int(words[order[rank]])]
        is_sure = float(counts[order[rank]] > counts[order[rank + 1]])
        weights += [0.2] * (rank > 0) + [is_sure * (_WORD_WEIGHT if rank else 1.0)]
    return Question(prompt, [*answer, STOP]), [*weights, 0.2]
