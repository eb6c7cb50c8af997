"""LongBench v2 from small files in its published form."""

import hashlib
import json
import re

import pytest

from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.metrics.code import stated_letter
from kvtool.evaluation.tasks.longbench_v2 import LongBenchV2
from kvtool.evaluation.tasks.table import task_class
from tests.evaluation.tasks.counters import WORDS

ROW = {
    "_id": "66f36490821e116aacb2cc22",
    "domain": "Single-Document QA",
    "sub_domain": "Financial",
    "difficulty": "easy",
    "length": "short",
    "question": "What was $Q$ sold for?",
    "choice_A": "ten",
    "choice_B": "$C_A$",
    "choice_C": "thirty",
    "choice_D": "nothing ",
    "answer": "C",
    "context": " A book about {sales}. ",
}
OFFICIAL = "Read.\n$DOC$\nAsked: $Q$\n(A) $C_A$\n(B) $C_B$\n(C) $C_C$\n(D) $C_D$\nGo."


def make(folder, *rows, **settings):
    (folder / "data.json").write_text(json.dumps(rows), "utf-8")
    return LongBenchV2(name="longbench-v2", data=str(folder), **settings)


def row(**changes):
    return {key: value for key, value in {**ROW, **changes}.items() if value != "gone"}


def record(sample, answer):
    (turn,) = sample.turns
    turns = [{"prediction": answer, "references": list(turn.references)}]
    made = {"turns": turns, "facts": sample.facts, "cell": dict(sample.cell)}
    return json.loads(json.dumps(made))


def test_a_choice_is_read_as_the_benchmark_reads_it():
    for answer, letter in [
        ("The correct answer is (B)", "B"),
        ("I think: The correct answer is B.", "B"),
        ("**The correct answer is (B)**", "B"),
        ("The correct answer is *C*", "C"),
        ("The correct answer is A. The correct answer is (D)", "D"),  # brackets come first
        ("the correct answer is (B)", None),
        ("(B)", None),
        ("The correct answer is (E)", None),
        ("", None),
    ]:
        assert stated_letter(answer) == letter


def test_a_prompt_is_the_text_then_question_and_choices(tmp_path):
    (sample,) = make(tmp_path, ROW).draw(WORDS)
    (turn,) = sample.turns
    assert sample.context.endswith("<text>\nA book about {sales}.")
    assert "\nQuestion: What was $Q$ sold for?\n" in turn.question
    assert "\n(A) ten\n(B) $C_A$\n(C) thirty\n(D) nothing\n" in turn.question
    assert turn.max_new_tokens == 128
    assert turn.references == ("C",)
    assert sample.facts == {"protocol": "kvtool-wording"}
    assert task_class("longbench-v2") is LongBenchV2


def test_answers_are_right_or_wrong(tmp_path):
    task = make(tmp_path, ROW)
    (sample,) = task.draw(WORDS)
    for answer, score in [
        ("The correct answer is (C).", 100),
        ("<think>The correct answer is (A)?</think>The correct answer is (C)", 100),
        ("<think>The correct answer is (C)", 0),
        ("The correct answer is (A)", 0),
        ("C", 0),
    ]:
        assert task.score(record(sample, answer)) == {"accuracy": score}


def test_scores_are_told_by_difficulty_and_by_length(tmp_path):
    kinds = [("easy", "short"), ("easy", "long"), ("hard", "long"), ("hard", "medium")]
    rows = [row(difficulty=one, length=two) for one, two in kinds]
    task = make(tmp_path, *rows)
    answers = ["The correct answer is C", "", "The correct answer is C", ""]
    records = [record(*pair) for pair in zip(task.draw(WORDS), answers, strict=True)]
    summary = task.summarise(records)
    assert summary.metrics["accuracy"].value == 50
    found = {tuple(at.items()): (each.value, each.n) for at, each in summary.cells}
    assert found == {
        (("difficulty", "easy"),): (50, 2),
        (("difficulty", "hard"),): (50, 2),
        (("length_bucket", "short"),): (100, 1),
        (("length_bucket", "medium"),): (0, 1),
        (("length_bucket", "long"),): (50, 2),
    }


def test_the_benchmarks_own_prompt_may_be_given(tmp_path):
    file = tmp_path / "0shot.txt"
    file.write_text(OFFICIAL)
    task = make(tmp_path, ROW, prompts=str(file))
    (sample,) = task.draw(WORDS)
    whole = sample.context + sample.turns[0].question
    assert whole == (
        "Read.\nA book about {sales}.\nAsked: What was $Q$ sold for?\n"
        "(A) ten\n(B) $C_A$\n(C) thirty\n(D) nothing\nGo."
    )
    assert task.protocol == sample.facts["protocol"] == "user-prompts"
    assert sample.facts["prompts"] == hashlib.sha256(file.read_bytes()).hexdigest()


def test_prompts_that_do_not_fit_are_refused(tmp_path):
    for text in (
        OFFICIAL.replace("$DOC$", ""),
        OFFICIAL.replace("Go.", "$Q$"),
        OFFICIAL.replace("Go.", "$DOC$"),
        "$Q$ " + OFFICIAL.replace("$Q$", ""),
    ):
        (tmp_path / "mine.txt").write_text(text)
        with pytest.raises(UsageError, match=re.escape("must have `$DOC$`, and then `$Q$` and")):
            list(make(tmp_path, ROW, prompts=str(tmp_path / "mine.txt")).draw(WORDS))
    with pytest.raises(UsageError, match=r"prompts: no file `.*none\.txt`"):
        list(make(tmp_path, ROW, prompts=str(tmp_path / "none.txt")).draw(WORDS))


def test_rows_of_another_form_are_refused_in_a_line(tmp_path):
    for changes, message in [
        ({"choice_D": "gone"}, "row 1 lacks column `choice_D`"),
        ({"difficulty": "gone"}, "row 1 lacks column `difficulty`"),
        ({"context": None}, "row 1 lacks `context`"),
        ({"question": 7}, "row 1: `question` holds int, no text"),
        ({"answer": "E"}, "row 1: `answer` must be A, B, C or D, got `E`"),
        ({"answer": "AB"}, "row 1: `answer` must be A, B, C or D, got `AB`"),
    ]:
        with pytest.raises(KvtoolError, match=re.escape(message)) as caught:
            list(make(tmp_path, row(**changes)).draw(WORDS))
        assert "\n" not in str(caught.value)


def test_short_answers_are_given_without_thinking():
    assert LongBenchV2(name="longbench-v2").enable_thinking is False
