"""LongMemEval from small files in its published form; scores that need no judge."""

import json
import re

import pytest

from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.metrics.text import abstains
from kvtool.evaluation.tasks.longmemeval import LongMemEval
from kvtool.evaluation.tasks.table import task_class
from tests.evaluation.tasks.counters import WORDS

ROW = {
    "question_id": "e47becba",
    "question_type": "single-session-user",
    "question": "What degree did I graduate with?",
    "answer": "Business Administration",
    "question_date": "2023/05/30 (Tue) 23:40",
    "haystack_session_ids": ["s1", "s2"],
    "haystack_dates": ["2023/05/29 (Mon) 10:00", "2023/05/20 (Sat) 02:21"],
    "haystack_sessions": [
        [{"role": "user", "content": "It rains."}, {"role": "assistant", "content": "Indeed."}],
        [{"role": "user", "content": "I studied {business}. ", "has_answer": True}],
    ],
    "answer_session_ids": ["s2"],
}
ABSENT = {**ROW, "question_id": "e47becba_abs", "answer": "You did not mention a degree."}
PREFERENCE = {**ROW, "question_id": "p", "question_type": "single-session-preference"}


def make(folder, *rows, **settings):
    (folder / "longmemeval_s.json").write_text(json.dumps(rows), "utf-8")
    return LongMemEval(name="longmemeval", data=str(folder), **settings)


def record(sample, answer):
    turns = [{"prediction": answer, "references": list(sample.turns[0].references)}]
    return json.loads(json.dumps({"turns": turns, "facts": sample.facts, "cell": sample.cell}))


def test_the_chats_are_the_context_in_the_order_of_their_dates(tmp_path):
    (sample,) = make(tmp_path, ROW).draw(WORDS)
    first = "### Chat 1, 2023/05/20 (Sat) 02:21\n\nuser: I studied {business}.\n"
    second = "### Chat 2, 2023/05/29 (Mon) 10:00\n\nuser: It rains.\n\nassistant: Indeed.\n"
    assert sample.context.endswith(f"\n{first}\n{second}")
    assert "has_answer" not in sample.context
    question = sample.turns[0].question
    assert "Today is 2023/05/30 (Tue) 23:40." in question
    assert question.endswith("\nQuestion: What degree did I graduate with?\nAnswer:")
    assert sample.id == "e47becba"
    assert task_class("longmemeval") is LongMemEval


def test_answers_are_compared_by_words(tmp_path):
    task = make(tmp_path, ROW)
    (sample,) = task.draw(WORDS)
    for answer, f1, found in [
        ("Business administration.", 100, 100),
        ("A degree in business administration", 200 / 3, 100),  # precision 1/2 (degree in ..)
        ("business", 200 / 3, 0),
        ("<think>hm</think>Business Administration", 100, 100),
        ("<think>Business Administration", 0, 0),
        ("I do not know", 0, 0),
    ]:
        scores = task.score(record(sample, answer))
        assert scores == {"qa_f1": pytest.approx(f1), "string_match_part": found}, answer


def test_what_was_never_said_is_not_to_be_answered(tmp_path):
    task = make(tmp_path, ABSENT)
    (sample,) = task.draw(WORDS)
    right, wrong = {"qa_f1": 100, "string_match_part": 100}, {"qa_f1": 0, "string_match_part": 0}
    assert task.score(record(sample, "I do not know.")) == right
    assert task.score(record(sample, "Business Administration")) == wrong
    assert task.score(record(sample, "")) == wrong
    assert task.score(record(sample, "<think>I do not know")) == wrong


def test_phrases_that_say_it_is_not_known():
    for answer, absent in [
        ("I do not know.", True),
        ("I don\N{RIGHT SINGLE QUOTATION MARK}t know", True),
        ("You did not mention your cat's name.", True),
        ("You never mentioned it.", True),
        ("The information provided is not enough.", True),
        ("There is no information about it.", True),
        ("There's no record of this in our chats.", True),
        ("That cannot be determined.", True),
        ("I can't tell from these chats.", True),
        ("I'm unable to answer.", True),
        ("Unknown", True),
        ("Tom", False),
        ("You mentioned that it is Tom.", False),
        ("You know him: Tom", False),
        ("Not Tom but Tim", False),
        ("", False),
    ]:
        assert abstains(answer) is absent


def test_scores_are_told_by_kind_of_question(tmp_path):
    rows = [ROW, {**ROW, "question_id": "2", "question_type": "multi-session"}, ABSENT]
    task = make(tmp_path, *rows)
    answers = ["Business Administration", "no idea", "I do not know"]
    records = [record(*pair) for pair in zip(task.draw(WORDS), answers, strict=True)]
    summary = task.summarise(records)
    found = {at["question_type"]: (each.value, each.n) for at, each in summary.cells}
    assert found == {
        "abstention": (100, 1),
        "multi-session": (0, 1),
        "single-session-user": (100, 1),
    }
    assert summary.metrics["qa_f1"].value == pytest.approx(200 / 3)


def test_questions_that_only_a_judge_can_score_are_left_out(tmp_path):
    rows = [PREFERENCE, ROW, ABSENT]
    assert [sample.id for sample in make(tmp_path, *rows).draw(WORDS)] == [
        "e47becba",
        "e47becba_abs",
    ]
    assert len(list(make(tmp_path, *rows, samples=1).draw(WORDS))) == 1
    with pytest.raises(UsageError, match="questions about preferences alone"):
        list(make(tmp_path, PREFERENCE).draw(WORDS))


def test_rows_of_another_form_are_refused_in_a_line(tmp_path):
    for changes, message in [
        ({"haystack_sessions": "gone"}, "lacks column `haystack_sessions`"),
        ({"answer": None}, "row 1 lacks `answer`"),
        ({"haystack_dates": ["2023"]}, "`content`, one for each of `haystack_dates`"),
        ({"haystack_sessions": [["a"], ["b"]]}, "are no lists of messages with `role` and"),
        ({"haystack_sessions": [[{"role": "user"}], []]}, "are no lists of messages with `role`"),
    ]:
        row = {key: value for key, value in {**ROW, **changes}.items() if value != "gone"}
        with pytest.raises(KvtoolError, match=re.escape(message)) as caught:
            list(make(tmp_path, row).draw(WORDS))
        assert "\n" not in str(caught.value)
