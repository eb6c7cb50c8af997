"""NoLiMa from a small needle set in its published form."""

import json
import re

import pytest

from kvtool.documents.settings import Protocol
from kvtool.errors import KvtoolError
from kvtool.evaluation.bench.bench import Bench
from kvtool.evaluation.samples.fit import needed_tokens
from kvtool.evaluation.tasks.nolima import NoLiMa, read_tests
from kvtool.evaluation.tasks.table import task_class
from tests.evaluation.tasks.counters import WORDS
from tests.evaluation.tasks.drawing import score
from tests.evaluation.variants import make_variants

NEEDLE = {
    "id": "0401",
    "reasoning_type": "world_knowledge",
    "system_prompt": "",
    "needle": "Actually, {CHAR} lives next to {1}.",
    "questions": {
        "onehop": "Which character has been to {2}?",
        "twohop": "Which character has been to {3}?",
    },
    "character_set": ["Yuki", "Stuart"],
    "tests": {
        "T1": {"input_args": ["the Kiasma museum", "Helsinki", "Uusimaa"]},
        "T2": {"input_args": ["the Semperoper", "Dresden", "Saxony"]},
    },
}
GOLD = {
    "id": "0501",
    "needle": "The {1} one was painted.",
    "questions": {"direct": "Which?"},
    "tests": {"T1": {"input_args": ["red"], "gold_answers": ["red", "scarlet"]}},
    "task_template": "Read {haystack} and say: {question}",
    "system_prompt": "Be brief.",
}


def make(folder, *needles, **settings):
    (folder / "needle_set.json").write_text(json.dumps(needles), "utf-8")
    return NoLiMa(name="nolima", data=str(folder), lengths=settings.pop("lengths", 400), **settings)


def scored(task, sample, answer):
    return score(task, sample, answer)["accuracy"]


def test_every_question_is_asked_about_every_input():
    tests = read_tests(NEEDLE, "here")
    assert [(test.name, test.needle, test.question) for test in tests] == [
        (
            f"0401_{name}_{kind}",
            f"Actually, {{CHAR}} lives next to {place}.",
            f"Which character has been to {asked}?",
        )
        for kind, name, place, asked in [
            ("onehop", "T1", "the Kiasma museum", "Helsinki"),
            ("onehop", "T2", "the Semperoper", "Dresden"),
            ("twohop", "T1", "the Kiasma museum", "Uusimaa"),
            ("twohop", "T2", "the Semperoper", "Saxony"),
        ]
    ]
    assert {test.characters for test in tests} == {("Yuki", "Stuart")}


def test_the_needle_is_hidden_with_a_character_that_is_the_answer(tmp_path):
    task = make(tmp_path, NEEDLE, depths="0,50,100")
    drawn = list(task.draw(WORDS))
    assert len(drawn) == 3 * 4
    assert len({sample.id for sample in drawn}) == 12
    for sample in drawn:
        ((name,),) = (turn.references for turn in sample.turns)
        stated = re.search(r"Actually, (\w+) lives next to the (Kiasma|Sempe)", sample.context)
        assert stated[1] == name
        assert name not in sample.turns[0].question
        assert 380 <= needed_tokens(sample, WORDS) <= 400
        place = stated.start() / len(sample.context)
        assert abs(100 * place - sample.cell["depth"]) < 35  # the words before the text count
    assert {sample.turns[0].references[0] for sample in drawn} == {"Yuki", "Stuart"}
    assert drawn == list(task.draw(WORDS))
    assert drawn != list(make(tmp_path, NEEDLE, depths="0,50,100", seed=1).draw(WORDS))


def test_the_first_pairs_are_taken_at_every_length_and_depth(tmp_path):
    drawn = list(make(tmp_path, NEEDLE, samples=2, depths=2, lengths="400,500").draw(WORDS))
    cells = [(400, 0), (400, 100), (500, 0), (500, 100)]
    assert [tuple(sample.cell.values()) for sample in drawn] == [c for c in cells for _ in "12"]


def test_an_answer_holds_the_character(tmp_path):
    task = make(tmp_path, NEEDLE, samples=1, depths=1)
    (sample,) = task.draw(WORDS)
    name = sample.turns[0].references[0]
    for answer, value in [
        (f"It is {name}.", 100),
        (name.lower(), 0),  # letter case counts
        (f"<think>{name}</think> Nobody.", 0),
        (f"<think>Who?</think> {name}", 100),
        ("", 0),
    ]:
        assert scored(task, sample, answer) == value
    assert task_class("nolima") is NoLiMa


def test_the_needle_sets_own_template_and_answers_are_used(tmp_path):
    task = make(tmp_path, GOLD, depths=1)
    (sample,) = task.draw(WORDS)
    (turn,) = sample.turns
    assert sample.context.startswith("Be brief.\n\nRead ")
    assert " The red one was painted." in sample.context
    assert turn.question == " and say: Which?"
    assert turn.references == ("red", "scarlet")
    assert scored(task, sample, "scarlet") == 100


def test_a_book_is_read_from_a_file(tmp_path):
    (tmp_path / "book.txt").write_text("It rained. " * 50)
    (sample,) = make(tmp_path, GOLD, depths=1, haystack=str(tmp_path / "book.txt")).draw(WORDS)
    assert sample.context.count("It rained.") > 20


def test_needle_sets_of_another_form_are_refused_in_a_line(tmp_path):
    for changes, message in [
        ({"tests": "gone"}, "lacks column `tests`"),
        ({"needle": None}, "row 1 lacks `needle`"),
        ({"tests": {"T1": {"input_args": ["a"]}}}, "`tests` need `input_args`, one for each"),
        ({"tests": {"T1": {}}}, "`tests` need `input_args`, one for each number"),
        ({"character_set": None}, "row 1 has neither `character_set` nor `gold_answers`"),
        ({"task_template": "{question} {haystack}"}, "must have {haystack}, and then {question}"),
        ({"distractors": {"onehop": "No."}}, "row 1 has `distractors`, which are not read"),
    ]:
        needle = {key: value for key, value in {**NEEDLE, **changes}.items() if value != "gone"}
        with pytest.raises(KvtoolError, match=re.escape(message)) as caught:
            list(make(tmp_path, needle).draw(WORDS))
        assert "\n" not in str(caught.value)


def test_a_model_that_knows_the_words_finds_the_character(loaded, counter, tmp_path):
    """The needle is one of those that the bundled model was trained to find, numbers for names."""
    stated = "The secret code for {1}: {CHAR}."
    needle = {
        "id": "0001",
        "needle": stated,
        "questions": {"literal": "What is the secret code for {1}? Answer: The code for {1}:"},
        "character_set": ["7429103", "5581272", "9034118"],
        "tests": {"T1": {"input_args": ["falcon"]}, "T2": {"input_args": ["tiger"]}},
        "task_template": "{haystack}\n Question: {question}",
    }
    task = make(tmp_path, needle, depths="10,60", lengths=600)
    (full, streaming) = make_variants(["streaming"], ["32"])
    protocol = Protocol(max_new_tokens=10)
    scores = {
        variant: [
            task.score(task.run(Bench(loaded, variant, protocol), sample))["accuracy"]
            for sample in task.draw(counter)
        ]
        for variant in (full, streaming)
    }
    assert scores == {full: [100] * 4, streaming: [0] * 4}
