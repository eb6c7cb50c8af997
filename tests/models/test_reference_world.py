"""The facts of the world: an oracle that only reads the text finds every expected answer."""

import re

import numpy as np
import pytest

from kvtool.errors import KvtoolError
from kvtool.models.reference.facts import NOUN_IDS
from kvtool.models.reference.filler import Filler
from kvtool.models.reference.frequent import ask_frequent
from kvtool.models.reference.tasks import TASKS, draw_example
from kvtool.models.reference.vocabulary import decode, encode
from training.rows import FILLER_WEIGHT, RANKING, Mixture, draw_row
from training.tokenizer import build_tokenizer

FILLER = Filler(0, 200)
TOKENIZER = build_tokenizer()


def facts_in(text: str) -> list[tuple[str, str]]:
    """Return every (key, value) stated before the question."""
    stated = re.findall(r"The (?:secret \w+|hidden word) for (\w+): ([^.]+)\.", text)
    stated += re.findall(r"The (?:route|value) from (\w+): (\w+)\.", text)
    return stated + re.findall(r"The value (\w+): (\w+)\.", text)


def follow(facts: list[tuple[str, str]], start: str) -> list[str]:
    hops, stops = dict(facts), []
    while start in hops:
        start = hops[start]
        stops.append(start)
    return stops


def work_out(context: str) -> str:
    """Solve a problem in steps, each by looking up what is written before it."""
    parts = (part.partition(":")[2] for part in context.split("\n"))
    words, listed = (dict(re.findall(r"(\w+): (\w+)", part)) for part in parts)
    held, written = {}, ""
    for name, source in listed.items():
        if source.islower():
            held[name] = source
            continue
        before = held[source]
        held[name] = words[before]
        written += f" {name}: {source} {before}: {held[name]} {name} {held[name]}"
    return written + "."


def oracle(text: str) -> str:
    context, question = text.split("\n Question: ")
    if context.startswith(" Words:") and "\n List:" in context:
        return work_out(context)
    facts, asked = facts_in(context), question.split("?")[0]
    if "most common" in asked:
        words = context.removeprefix(" Words:").rstrip(".").split()
        return " " + ", ".join(sorted(set(words), key=words.count, reverse=True)[:3]) + "."
    if asked.startswith(("What are the stops", "Which variables")):
        return "".join(f" {name}" for name in follow(facts, asked.split()[-1])) + "."
    keys = asked.split(" for ")[1].split(", ")
    if len(keys) > 1:
        return " " + ", ".join(f"{key}: {dict(facts)[key]}" for key in keys) + "."
    return " " + ", ".join(value for key, value in facts if key == keys[0]) + "."


@pytest.mark.parametrize("task", TASKS)
def test_the_oracle_agrees(task):
    for seed in range(8):
        example = draw_example(np.random.default_rng(seed), task, 307, FILLER)
        assert oracle(decode(example.context + example.question)) == decode(example.answer)


@pytest.mark.parametrize("task", sorted(TASKS.keys() - {"trace"}))
def test_prompts_have_the_length_asked_for_and_the_tokenizer_agrees(task):
    for tokens in (307, 1024):
        example = draw_example(np.random.default_rng(3), task, tokens, FILLER)
        prompt = example.context + example.question
        assert 0 <= tokens - len(prompt) <= 16
        assert TOKENIZER(decode(prompt))["input_ids"] == prompt
        whole = prompt + example.answer
        assert TOKENIZER(decode(whole))["input_ids"] == whole


@pytest.mark.parametrize(("tokens", "spare"), [(59, 0), (66, 7), (576, 5), (4096, 3109)])
def test_steps_take_the_length_asked_for_with_their_answer(tokens, spare):
    example = draw_example(np.random.default_rng(3), "trace", tokens, FILLER)
    whole = example.context + example.question + example.answer
    assert tokens - len(whole) == spare  # of the last, all 117 names are used
    assert TOKENIZER(decode(whole))["input_ids"] == whole


def test_steps_that_do_not_fit_are_refused():
    with pytest.raises(KvtoolError, match="tokens 58 is too few for steps, which need 59"):
        draw_example(np.random.default_rng(0), "trace", 58, FILLER)


def test_an_unknown_task_is_refused():
    with pytest.raises(KvtoolError, match="no task named `needles`; choose one of: dense"):
        draw_example(np.random.default_rng(0), "needles", 256, FILLER)


def test_facts_that_do_not_fit_are_refused():
    with pytest.raises(KvtoolError, match="tokens 64 is too few for task `multivalue`"):
        draw_example(np.random.default_rng(0), "multivalue", 64, FILLER)


def test_encode_agrees_with_the_tokenizer():
    text = "\n Question: What is the secret code for falcon? Answer: 17 ( BA: 4 =-)"
    assert encode(text) == TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert decode(encode(text)) == text


def test_another_seed_gives_other_sentences():
    rng = [np.random.default_rng(0) for _ in range(3)]
    same = FILLER.take(rng[0], 99), Filler(0, 200).take(rng[1], 99)
    assert same[0] == same[1] != Filler(1, 200).take(rng[2], 99)


def test_a_ranking_has_the_words_by_count_and_ties_weigh_nothing():
    words = NOUN_IDS[:10]
    counts = np.array([9, 2, 30, 12, 12, 8, 7, 6, 1, 0])
    question, weights = ask_frequent(words, counts, RANKING, 8)
    assert question.prompt == RANKING
    assert question.answer[::2] == words[[2, 3, 4, 0, 5, 6, 7, 1]].tolist()
    assert weights[::2] == [1.0, 0.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    asked, weights = ask_frequent(words, counts)
    assert asked.answer[::2] == question.answer[:5:2]
    assert weights[::2] == [1.0, 0.0, 5.0]


def test_only_answers_count_in_full_and_each_is_stated_before():
    rng = np.random.default_rng(11)
    for _ in range(40):
        row = draw_row(rng, 256, FILLER, Mixture(echo=0, frequent=0, recap=0))
        text = decode(row.ids)
        context, *questions = text.split("\n Question: ")
        weighed = [t for t, w in zip(row.ids, row.weights, strict=True) if w > FILLER_WEIGHT]
        answers = "".join(oracle(f"{context}\n Question: {question}") for question in questions)
        assert decode(weighed) == answers
