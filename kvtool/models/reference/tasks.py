"""The tasks the reference model is measured on: a context, one question, its answer.

The built-in prompt is one of them: one needle in a page of filler, and the question about it.
"""

from dataclasses import dataclass

import numpy as np

from kvtool.errors import KvtoolError
from kvtool.models.reference import facts, frequent
from kvtool.models.reference.filler import Filler
from kvtool.models.reference.steps_task import draw_trace, longest_within
from kvtool.models.reference.vocabulary import BOS, decode, encode

TASKS = {
    "single": "one needle: one key, one code",
    "multikey": "eight keys, one asked for",
    "dense": "nothing but needles, one asked for",
    "words": "eight keys with one to three words as values, one asked for",
    "multiquery": "eight keys, four asked for in one question",
    "multivalue": "one key with four codes among three other keys, all four asked for",
    "route": "three routes of five names; the four names after a given one",
    "variables": "three values passed on through five variables; all holders of one value",
    "frequent": "the three most common words of a list",
    "trace": "a chain of steps, all written out; for the second model",
}


@dataclass(frozen=True)
class Example:
    """One prompt of a task: `context + question` is the prompt, `answer` follows it."""

    context: list[int]
    question: list[int]
    answer: list[int]


def _needles(rng: np.random.Generator, count: int, *, words: bool = False) -> dict[int, list[int]]:
    keys = rng.choice(facts.NOUN_IDS, count, replace=False).tolist()
    return {
        key: facts.nouns(rng, facts.LONGEST_PHRASE) if words else facts.code(rng) for key in keys
    }


def _ask_one(
    rng: np.random.Generator, needles: dict[int, list[int]]
) -> tuple[list[list[list[int]]], facts.Question]:
    key = list(needles)[rng.integers(len(needles))]
    groups = [[facts.needle(*needle)] for needle in needles.items()]
    return groups, facts.ask_value(key, needles[key])


def _ask_several(
    rng: np.random.Generator, needles: dict[int, list[int]]
) -> tuple[list[list[list[int]]], facts.Question]:
    keys = rng.permutation(list(needles))[:4].tolist()
    groups = [[facts.needle(*needle)] for needle in needles.items()]
    return groups, facts.ask_several_keys(keys, [needles[key] for key in keys])


def _ask_all(rng: np.random.Generator) -> tuple[list[list[list[int]]], facts.Question]:
    *others, (key, _) = _needles(rng, 4).items()
    values = [facts.code(rng) for _ in range(4)]
    groups = [[facts.needle(*needle)] for needle in others]
    groups.append([facts.needle(key, value) for value in values])
    return groups, facts.ask_all_values(key, values)


def _names(rng: np.random.Generator) -> list[list[int]]:
    return rng.choice(facts.VARIABLE_IDS, (3, 5), replace=False).tolist()


def _ask_variables(rng: np.random.Generator) -> tuple[list[list[list[int]]], facts.Question]:
    held = [(facts.code(rng, 5, 5), names) for names in _names(rng)]
    groups = [facts.assignments(*chain) for chain in held]
    return groups, facts.ask_variables(*held[rng.integers(len(held))])


def _plant(
    rng: np.random.Generator, task: str, tokens: int
) -> tuple[list[list[list[int]]], facts.Question]:
    """Draw the facts of a task and its question."""
    if task == "multivalue":
        return _ask_all(rng)
    if task == "route":
        routes = _names(rng)
        return [facts.route(names) for names in routes], facts.ask_route(routes[rng.integers(3)])
    if task == "variables":
        return _ask_variables(rng)
    if task == "multiquery":
        return _ask_several(rng, _needles(rng, 8))
    if task == "words":
        return _ask_one(rng, _needles(rng, 8, words=True))
    dense = max(1, min(190, (tokens - 40) // 15))
    return _ask_one(rng, _needles(rng, {"single": 1, "multikey": 8, "dense": dense}[task]))


def _frequent(rng: np.random.Generator, tokens: int) -> Example:
    """Draw word lists until the first four places have no tie."""
    room = tokens - len(frequent.HEAD) - len(frequent.PROMPT) - 2
    while True:
        words, indices = frequent.draw_list(rng, room, distinct=40, exponent=2.0)
        counts = np.bincount(indices, minlength=40)
        if np.all(np.diff(np.sort(counts)[::-1][:4]) < 0):
            question, _ = frequent.ask_frequent(words, counts)
            context = [BOS, *frequent.HEAD, *words[indices].tolist(), *encode(".")]
            return Example(context, question.prompt, question.answer)


def _trace(rng: np.random.Generator, tokens: int) -> Example:
    """Draw steps whose problem and answer together have at most `tokens` tokens."""
    problem = draw_trace(rng, longest_within(tokens))
    context, question = encode(problem.context), encode(problem.question)
    return Example([BOS, *context], question, encode(problem.answer))


def draw_example(rng: np.random.Generator, task: str, tokens: int, filler: Filler) -> Example:
    """Draw a prompt of `tokens` tokens or slightly fewer, with its answer.

    Of `trace`, the answer counts, too.

    Raises:
        KvtoolError: the task is unknown, or its facts and question do not fit in `tokens`.
    """
    if task not in TASKS:
        raise KvtoolError(f"no task named `{task}`; choose one of: {', '.join(sorted(TASKS))}")
    if task == "frequent":
        return _frequent(rng, tokens)
    if task == "trace":
        return _trace(rng, tokens)
    groups, question = _plant(rng, task, tokens)
    planted = sum(len(sentence) for group in groups for sentence in group)
    room = tokens - 1 - planted - len(question.prompt)
    if room < 0:
        needed = tokens - room
        raise KvtoolError(f"tokens {tokens} is too few for task `{task}`, which needs {needed}")
    context = [BOS]
    for sentence, _ in facts.scatter(rng, filler.take(rng, room), groups):
        context += sentence
    return Example(context, question.prompt, question.answer)


_FILLER_SENTENCES = 500
_FILLER_SEED = 2


def needle_prompt(tokens: int = 1024, seed: int = 0) -> tuple[str, str]:
    """Write a prompt whose answer the reference model finds with a full cache.

    Args:
        tokens: length of the prompt, `<bos>` included; it comes out at most 16 tokens shorter.
        seed: another seed hides another needle elsewhere.

    Returns:
        The prompt, which ends where the answer begins, and the answer with its leading space.

    Raises:
        KvtoolError: `tokens` is too few for the needle and its question.
    """
    rng = np.random.default_rng([seed, tokens])
    example = draw_example(rng, "single", tokens, Filler(_FILLER_SEED, _FILLER_SENTENCES))
    return decode(example.context + example.question), decode(example.answer[:-1])
