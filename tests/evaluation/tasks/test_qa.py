"""Questions of the user's own, from a file."""

from __future__ import annotations

import json

import pytest

from kvtool.errors import KvtoolError
from kvtool.evaluation.tasks.qa import Questions
from kvtool.evaluation.tasks.table import task_class
from tests.evaluation.tasks.counters import WORDS

ROWS = [
    {"context": "Ann has a red boat. ", "question": "What has Ann?", "answers": ["a boat", "boat"]},
    {"id": "b", "context": "It is 7.", "question": "How many?", "answers": 7, "more": None},
]


def task(tmp_path, rows=ROWS, **settings):
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return Questions(name="qa", data=str(file), **settings)


def test_a_row_is_a_context_and_a_question(tmp_path):
    first, second = task(tmp_path, max_new_tokens=5).draw(WORDS)
    assert (first.id, second.id) == ("1", "b")
    assert first.context == "Ann has a red boat."
    (turn,) = first.turns
    assert turn.question == "\n\nQuestion: What has Ann?\n"
    assert turn.answer_prefix == "Answer:"
    assert turn.references == ("a boat", "boat")
    assert turn.max_new_tokens == 5
    assert second.turns[0].references == ("7",)
    assert len(list(task(tmp_path, samples=1).draw(WORDS))) == 1


def test_scores_by_hand(tmp_path):
    for answer, f1, exact, part in [
        (" The boat.\nQuestion: more", 100, 100, 100),
        (" red boat", 200 * (1 / 2 * 1) / (3 / 2), 0, 100),
        (" a car\nor a boat", 0, 0, 100),
        (" a car", 0, 0, 0),
        (" a boatman", 0, 0, 0),
        ("<think>a boat</think>\nboat", 100, 100, 100),
    ]:
        turns = [{"prediction": answer, "references": ["a boat"]}]
        found = task(tmp_path).score({"turns": turns, "facts": {}})
        assert found == pytest.approx(
            {"qa_f1": f1, "exact_match": exact, "string_match_part": part}
        )


def test_a_lacking_column_is_named(tmp_path):
    assert task_class("qa") is Questions
    with pytest.raises(KvtoolError, match="answers"):
        list(task(tmp_path, [{"context": "a", "question": "b"}]).draw(WORDS))
