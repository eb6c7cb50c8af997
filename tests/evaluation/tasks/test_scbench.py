"""SCBench's drawn tasks: budgets, right and wrong answers, and what may not matter."""

import json
import re
import statistics

import pytest

from kvtool.errors import UsageError
from kvtool.evaluation.samples.random_data import STATISTICS
from kvtool.evaluation.samples.sample import Sample, Turn
from kvtool.evaluation.tasks import scbench
from tests.evaluation.tasks import drawing
from tests.evaluation.tasks.counters import WORDS, bundled

NEW_TOKENS = {"kv": 150, "prefix_suffix": 150, "vt": 30, "mf": 5}
TASKS = list(NEW_TOKENS)


def make(name, **settings):
    return drawing.make(f"scbench/{name}", **settings)


def draw(name, tokens=WORDS, **settings):
    return list(make(name, **settings).draw(tokens))


def record(sample, answers):
    turns = [
        {"prediction": answer, "references": list(turn.references)}
        for turn, answer in zip(sample.turns, answers, strict=True)
    ]
    return {"turns": turns, "facts": sample.facts}


def conversation(sample, turns, golden=True):
    """The text up to where the last of `turns` answers begins."""
    text = sample.context
    for turn in sample.turns[: turns - 1]:
        text += turn.question + turn.answer_prefix + (f" {turn.references[0]}" if golden else "")
    return text + sample.turns[turns - 1].question + sample.turns[turns - 1].answer_prefix


QUESTIONS = {
    "kv": r"\n Question: What is the value of \"[0-9a-f-]{36}\"\? Answer:",
    "prefix_suffix": r"\n Question: Which string begins with .\w+. and ends with .\w+.\? Answer:",
    "vt": r"\n Question: Which variables have the value \d{5}\? Answer:",
    "mf": r"\n Question: What is the [a-z ]+ of the list\? Answer:",
}


@pytest.mark.parametrize("name", TASKS)
def test_answers_to_five_questions_are_in_the_context(name):
    (sample,) = draw(name, lengths=1024, samples=1)
    assert len(sample.turns) == 5
    for turn in sample.turns:
        assert re.fullmatch(QUESTIONS[name], turn.question)
        answers = turn.references[0].split()
        assert answers
        assert all(re.search(rf"\b{re.escape(each)}\b", sample.context) for each in answers)


@pytest.mark.parametrize("name", TASKS)
def test_the_whole_conversation_nearly_fills_the_length(name):
    for tokens, slack, length in [(bundled(), 90, 1024), (WORDS, 16, 3000)]:
        for sample in draw(name, tokens, lengths=length, samples=3):
            used = tokens.count(conversation(sample, 5)) + NEW_TOKENS[name] + tokens.special
            assert length - slack < used <= length
            assert sample.cell == {"length": length}
            assert {turn.max_new_tokens for turn in sample.turns} == {NEW_TOKENS[name]}


def test_the_models_own_answers_get_their_room():
    for name in TASKS:
        (sample,) = draw(name, lengths=2048, samples=1, golden=False)
        said = WORDS.count(conversation(sample, 5, golden=False)) + 5 * NEW_TOKENS[name] + 1
        assert 2048 - 16 < said <= 2048


def test_different_queries_share_the_length_but_not_each_other():
    for name in TASKS:
        (sample,) = draw(name, lengths=2048, samples=1, mode="scdq")
        used = [
            WORDS.count(sample.context + turn.question + turn.answer_prefix) + NEW_TOKENS[name] + 1
            for turn in sample.turns
        ]
        assert 2048 - 16 < max(used) <= 2048


def test_the_longest_prompt_of_a_worked_conversation():
    turns = (Turn(" q q", ("a a a",), 7, " p"), Turn(" q", ("a",), 50), Turn(" q", ("a",), 2))
    sample = Sample("s", "c c c c", turns)
    # 1 special + 4, then 3 + 7 new; then 3 + 3 said + 1 + 50 new, the most; then 3 + 3 + 1 + 1 + 1
    assert make("kv").needed_tokens(sample, WORDS) == 5 + 57
    # the model may have said 7 before that
    assert make("kv", golden=False).needed_tokens(sample, WORDS) == 5 + 3 + 7 + 1 + 50 + 1 + 2
    assert make("kv", mode="scdq").needed_tokens(sample, WORDS) == 5 + 51


@pytest.mark.parametrize("name", TASKS)
def test_a_perfect_answer_scores_100_and_any_other_0(name):
    task = make(name)
    for sample in draw(name, samples=2):
        answers = [f" {turn.references[0]}." for turn in sample.turns]
        assert task.score(record(sample, answers)) == {task.metric: 100}
        assert task.score(record(sample, [""] * 5)) == {task.metric: 0}
        wrong = "100" if name == "mf" else "none of them: 00000 aa-bb"
        assert task.score(record(sample, [wrong] * 5)) == {task.metric: 0}


def test_the_answer_to_another_turn_is_wrong():
    for name in ["kv", "prefix_suffix"]:
        task, (sample,) = make(name), draw(name, samples=1)
        answers = [turn.references[0] for turn in sample.turns]
        assert task.score(record(sample, answers[1:] + answers[:1])) == {task.metric: 0}
        two_right = [*answers[:2], "", "", ""]
        assert task.score(record(sample, two_right)) == {task.metric: 40}


def test_variables_score_the_share_of_names_to_two_decimals():
    task = make("vt")
    assert task.score_answer(" BA, CE and ZU", ["BA CE DI"], {}) == 67  # 2 of 3
    assert task.score_answer("BA", ["BA CE DI"], {}) == 33
    assert task.score_answer("the table is big", ["BA IS BI"], {}) == 0  # no part of a word


def test_math_find_takes_the_first_number():
    task = make("mf")
    assert task.score_answer(" 47.0 or 12", ["47"], {}) == 100
    assert task.score_answer(" 12 or 47", ["47"], {}) == 0


@pytest.mark.parametrize("name", TASKS)
def test_a_sample_depends_on_seed_and_length_only(name):
    few, many = draw(name, samples=2), draw(name, samples=4, lengths="2K,1K")
    assert few == [sample for sample in many if sample.cell["length"] == 1024][:2]
    assert draw(name, samples=2) == few
    assert len({sample.id for sample in many}) == 8
    assert len({sample.context for sample in many}) == 8
    assert draw(name, samples=1, seed=1)[0].context != few[0].context


def test_a_length_that_is_too_short_is_refused_with_the_least():
    with pytest.raises(UsageError, match="scbench/vt: length 64 is too short") as raised:
        draw("vt", lengths=64)
    assert "5 turns takes" in str(raised.value)
    least = int(re.search(r"lengths of (\d+) or more, or fewer turns", raised.value.hint)[1])
    assert str(least) in str(raised.value)
    assert len(draw("vt", lengths=least + 16, samples=3)) == 3


def test_settings_out_of_range_are_refused():
    for settings in [{"turns": 6}, {"turns": 0}, {"mode": "both"}, {"samples": 0}]:
        with pytest.raises(ValueError):
            make("kv", **settings)


# ---- what the contexts hold


def test_key_values_are_json_with_every_asked_key():
    (sample,) = draw("kv", samples=1, lengths=4096)
    pairs = json.loads(sample.context.partition("\n")[2])
    asked = [re.search('"(.*)"', turn.question)[1] for turn in sample.turns]
    assert [(pairs[key],) for key in asked] == [turn.references for turn in sample.turns]
    assert len(pairs) > 1000
    places = [list(pairs).index(key) / len(pairs) for key in asked]
    assert max(places) - min(places) > 0.3


def test_exactly_one_string_has_the_ends_that_are_asked_for():
    (sample,) = draw("prefix_suffix", samples=1, lengths=4096)
    strings = sample.context.partition("\n")[2].split(", ")
    assert len(strings) > 2000
    for turn in sample.turns:
        prefix, suffix = re.findall('"(.*?)"', turn.question)
        found = [text for text in strings if text.startswith(prefix) and text.endswith(suffix)]
        assert (*found,) == turn.references


def test_other_strings_with_these_ends_are_left_out(monkeypatch):
    def from_two_letters(rng, shortest, longest):
        return "".join(rng.choice(["a", "b"], 8))

    monkeypatch.setattr(scbench, "random_string", from_two_letters)
    (sample,) = draw("prefix_suffix", samples=1)
    ends = [text[:3] + text[-3:] for text in sample.context.partition("\n")[2].split(", ")]
    assert len(ends) > 200
    asked = [turn.references[0][:3] + turn.references[0][-3:] for turn in sample.turns]
    assert [ends.count(pair) for pair in asked] == [1] * 5


def test_a_value_leads_through_its_variables_in_order():
    for sample in draw("vt", bundled(), samples=3, lengths=512):
        start = dict(re.findall(r"The value (\d{5}): ([A-Z]{2})\.", sample.context))
        hops = list(re.finditer(r"The value from ([A-Z]{2}): ([A-Z]{2})\.", sample.context))
        where = {hop[1]: (hop[2], hop.start()) for hop in hops}
        assert len(start) == 5
        assert len(where) == 20
        for turn in sample.turns:
            names, place = [start[re.search(r"\d{5}", turn.question)[0]]], -1
            while names[-1] in where:
                name, at = where[names[-1]]
                assert at > place
                names, place = [*names, name], at
            assert " ".join(names) == turn.references[0]


def test_one_question_about_variables_still_has_other_values_around():
    (sample,) = draw("vt", samples=1, turns=1)
    assert len(re.findall(r"The value \d{5}:", sample.context)) == 3


def test_the_statistics_are_those_of_the_list_that_is_shown():
    slow = {
        "largest number": lambda sorted_: sorted_[-1],
        "smallest number": lambda sorted_: sorted_[0],
        "second largest number": lambda sorted_: max(n for n in sorted_ if n != sorted_[-1]),
        "second smallest number": lambda sorted_: min(n for n in sorted_ if n != sorted_[0]),
        "median": statistics.median,
    }
    orders = set()
    for sample in draw("mf", samples=5):
        numbers = sorted(map(int, re.findall(r"\d+", sample.context)))
        kinds = [
            re.search("What is the (.*) of the list", turn.question)[1] for turn in sample.turns
        ]
        orders.add((*kinds,))
        assert sorted(kinds) == sorted(STATISTICS)
        for kind, turn in zip(kinds, sample.turns, strict=True):
            assert turn.references == (str(slow[kind](numbers)),)
    assert len(orders) > 1
