"""InfiniteBench's drawn tasks: budgets, right and wrong answers, and true references."""

import json
import re
import statistics

import pytest

from kvtool.errors import UsageError
from tests.evaluation.tasks import drawing
from tests.evaluation.tasks.counters import WORDS, bundled

NEW_TOKENS = {
    "passkey": 6,
    "number_string": 12,
    "kv_retrieval": 50,
    "math_find": 3,
    "code_run": 5,
}
TASKS = [*NEW_TOKENS, "math_calc"]


def make(name, **settings):
    return drawing.make(f"infinitebench/{name}", **settings)


def draw(name, tokens=WORDS, **settings):
    return list(make(name, **settings).draw(tokens))


def score(task, sample, answer) -> float:
    return drawing.score(task, sample, answer)[task.metric]


@pytest.mark.parametrize("name", TASKS)
def test_prompt_and_answer_nearly_fill_the_length(name):
    for tokens, slack, length in [(bundled(), 90, 256), (bundled(), 90, 3000), (WORDS, 30, 3000)]:
        for sample in draw(name, tokens, lengths=length, samples=3):
            (turn,) = sample.turns
            prompt = sample.context + turn.question + turn.answer_prefix
            used = tokens.count(prompt) + turn.max_new_tokens + tokens.special
            assert length - slack < used <= length
            assert sample.cell == {"length": length}
            assert turn.max_new_tokens == NEW_TOKENS.get(name, turn.max_new_tokens)


@pytest.mark.parametrize("name", TASKS)
def test_a_perfect_answer_scores_100_and_any_other_0(name):
    task, tokens = make(name), bundled()
    for sample in draw(name, tokens, samples=3):
        (turn,) = sample.turns
        assert score(task, sample, f" {turn.references[0]}") == 100
        assert tokens.count(f" {turn.references[0]}") <= turn.max_new_tokens
        assert score(task, sample, "") == 0
        assert score(task, sample, "no idea: 12345678") == 0


@pytest.mark.parametrize("name", TASKS)
def test_a_sample_depends_on_seed_and_length_only(name):
    few, many = draw(name, samples=2), draw(name, samples=4, lengths="2K,1K")
    assert few == [sample for sample in many if sample.cell["length"] == 1024][:2]
    assert draw(name, samples=2) == few
    assert len({sample.id for sample in many}) == 8
    assert len({sample.context for sample in many}) == 8
    assert draw(name, samples=1, seed=1)[0].context != few[0].context


def test_a_length_that_is_too_short_is_refused_with_the_least():
    for name in TASKS:
        with pytest.raises(
            UsageError, match=f"infinitebench/{name}: length 9 is too short"
        ) as raised:
            draw(name, bundled(), lengths=9)
        least = int(re.search(r"lengths of (\d+) or more", raised.value.hint)[1])
        assert len(draw(name, bundled(), lengths=least + 32, samples=1)) == 1


# ---- what the contexts hold


@pytest.mark.parametrize(("name", "digits"), [("passkey", 5), ("number_string", 10)])
def test_the_number_is_stated_twice_under_the_key_that_is_asked_for(name, digits):
    places = []
    for sample in draw(name, samples=10):
        (turn,) = sample.turns
        (number,) = turn.references
        assert re.fullmatch(rf"\d{{{digits}}}", number)
        assert turn.answer_prefix[1:-1] in turn.question.replace("What is the", "The")
        assert sample.context.count(f"{turn.answer_prefix} {number}.") == 2
        assert len(re.findall(r"\d+", sample.context)) == 2
        places.append(sample.context.index(number) / len(sample.context))
    assert max(places) - min(places) > 0.4
    if digits == 10:
        assert all(number[i] == number[i + 1] for i in range(0, 10, 2))


def test_the_key_is_in_the_object_with_its_value():
    (sample,) = draw("kv_retrieval", samples=1, lengths=4096)
    pairs = json.loads(sample.context.partition("\n")[2])
    key = re.search('"(.*)"', sample.turns[0].question)[1]
    assert (pairs[key],) == sample.turns[0].references
    assert len(pairs) > 1000


def test_a_value_counts_only_as_a_whole_word():
    task = make("kv_retrieval")
    assert task.score_answer(' "ab-1".', ["ab-1"], {}) == 100
    assert task.score_answer(" ab-12", ["ab-1"], {}) == 0


def test_the_number_asked_for_is_that_of_the_list_that_is_shown():
    kinds = set()
    for sample in draw("math_find", samples=20):
        numbers = sorted(map(int, re.findall(r"\d+", sample.context)))
        kind = re.search("What is the (.*) of the list", sample.turns[0].question)[1]
        answer = {
            "largest number": numbers[-1],
            "smallest number": numbers[0],
            "second largest number": max(set(numbers) - {numbers[-1]}),
            "second smallest number": min(set(numbers) - {numbers[0]}),
            "median": statistics.median(numbers),
        }[kind]
        assert sample.turns[0].references == (str(answer),)
        kinds.add(kind)
    assert len(kinds) == 5


def test_the_values_of_a_calculation_are_what_python_gets():
    for sample in draw("math_calc", samples=3):
        blocks = re.findall(r"Calculation: (.*)(?:\nValues: (.*))?", sample.context)
        assert len(blocks) == 2
        shown = [blocks[0], (blocks[1][0], sample.turns[0].references[0])]
        for calculation, answer in shown:
            terms = calculation.split()
            values = [eval(" ".join(terms[: i + 1])) for i in range(0, len(terms), 2)]
            assert ", ".join(map(str, values)) == answer
            assert all(0 <= value <= 99 for value in values)


def test_a_calculation_scores_up_to_the_first_wrong_value():
    task = make("math_calc")
    assert task.score_answer(" 12, 17, 9, 4", ["12, 17, 8, 4"], {}) == 50
    assert task.score_answer("[12, 17, 8", ["12, 17, 8, 4"], {}) == 75


def test_python_returns_what_is_asked_for():
    depths = set()
    for sample in draw("code_run", samples=12, lengths=2048):
        names: dict = {}
        exec(sample.context.partition("\n")[2], names)
        call = re.search(r"func_\d+\(\d+\)", sample.turns[0].question)[0]
        assert (str(eval(call, names)),) == sample.turns[0].references
        calls = dict(re.findall(r"def func_(\d+)\(x\):\n    return func_(\d+)", sample.context))
        depth, name = 1, re.search(r"\d+", call)[0]
        while name in calls:
            depth, name = depth + 1, calls[name]
        depths.add(depth)
        assert 2 <= depth <= 10
    assert len(depths) > 3
