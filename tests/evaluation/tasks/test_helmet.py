"""HELMET's recall tasks from small files in their published form."""

import json
import re

import pytest

from kvtool.errors import KvtoolError
from kvtool.evaluation.tasks.helmet import FORMS, Helmet
from kvtool.evaluation.tasks.table import TASKS, expand
from tests.evaluation.tasks.counters import WORDS
from tests.evaluation.tasks.drawing import score

PAIRS = {
    "context": '{"a-1": "x-9", "b-2": "Y-8"}',
    "question": "b-2",
    "answer": "Y-8",
    "demos": [["a-1", "x-9"], ["c-3", "z-7"], ["d-4", "w-6"]],
    "num_kvs": 2,
}
NEEDLE = {
    "context": "One of the special magic numbers for lamp is: 123.",
    "query": "lamp",
    "type_needle_v": "number",
    "answer": ["123"],
}
ROWS = {
    "json_kv": PAIRS,
    "ruler_niah_mk_2": NEEDLE,
    "ruler_niah_mk_3": {**NEEDLE, "type_needle_v": "uuid", "query": "a-1", "answer": ["x-9"]},
    "ruler_niah_mv": {
        "context": NEEDLE["context"],
        "query": "lamp",
        "type_needle_v": "numbers",
        "outputs": ["123", "456", "789", "901"],
    },
}
NEW_TOKENS = {"json_kv": 100, "ruler_niah_mk_2": 50, "ruler_niah_mk_3": 100, "ruler_niah_mv": 50}


def make(folder, name, *rows, **settings):
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return Helmet(name=f"helmet/{name}", data=str(file), **settings)


def prompt(sample):
    (turn,) = sample.turns
    return sample.context + turn.question + turn.answer_prefix


def scored(task, sample, answer):
    return score(task, sample, answer)["string_match_all"]


def test_the_table_has_the_tasks():
    assert expand("helmet") == [f"helmet/{name}" for name in FORMS]
    assert {TASKS[f"helmet/{name}"] for name in ROWS} == {"helmet:Helmet"}


@pytest.mark.parametrize("name", ROWS)
def test_values_are_looked_for_in_the_answer(name, tmp_path):
    task = make(tmp_path, name, ROWS[name])
    (sample,) = task.draw(WORDS)
    (turn,) = sample.turns
    assert turn.max_new_tokens == NEW_TOKENS[name]
    assert scored(task, sample, f"They are {', '.join(turn.references).lower()}.") == 100
    assert scored(task, sample, f"<think>{turn.references[0]}") == 0
    assert scored(task, sample, "none") == 0
    if name == "ruler_niah_mv":
        assert scored(task, sample, "123, 901") == 50


def test_pairs_are_asked_for_after_two_examples(tmp_path):
    (sample,) = make(tmp_path, "json_kv", PAIRS).draw(WORDS)
    assert prompt(sample).startswith(PAIRS["context"] + "\n\n")
    assert prompt(sample).endswith(
        "\n\nKey: a-1\nCorresponding value: x-9\n\nKey: c-3\nCorresponding value: z-7\n\n"
        "Key: b-2\nCorresponding value:"
    )
    assert sample.turns[0].answer_prefix == "\nCorresponding value:"
    (sample,) = make(tmp_path, "json_kv", PAIRS, shots=0).draw(WORDS)
    assert prompt(sample).count("Key: ") == 1


def test_needles_are_asked_for_in_the_words_of_the_data(tmp_path):
    for name, cue in [
        ("ruler_niah_mk_2", "\nThe special magic number for lamp in the text is"),
        ("ruler_niah_mk_3", "\nThe special magic uuid for a-1 in the text is"),
        ("ruler_niah_mv", "\nThe special magic numbers for lamp in the text are"),
    ]:
        (sample,) = make(tmp_path, name, ROWS[name]).draw(WORDS)
        assert f"\n\n{NEEDLE['context']}\n\nWhat " in prompt(sample)
        assert prompt(sample).endswith(cue)


def test_rows_of_another_form_are_refused_in_a_line(tmp_path):
    for name, changes, message in [
        ("json_kv", {"demos": PAIRS["demos"][:1]}, "row 1 lacks 2 pairs of key and value in"),
        ("json_kv", {"demos": ["ab", "cd"]}, "row 1 lacks 2 pairs of key and value in `demos`"),
        ("json_kv", {"answer": []}, "row 1 lacks an `answer` (or `outputs`)"),
        ("json_kv", {"answer": ""}, "row 1 lacks an `answer`"),
        ("json_kv", {"question": "gone"}, "lacks column `question`"),
        ("ruler_niah_mk_2", {"type_needle_v": "gone"}, "lacks column `type_needle_v`"),
        ("ruler_niah_mk_2", {"answer": "gone"}, "row 1 lacks an `answer`"),
        ("ruler_niah_mk_2", {"query": None}, "row 1 lacks `query`"),
    ]:
        row = {key: value for key, value in {**ROWS[name], **changes}.items() if value != "gone"}
        with pytest.raises(KvtoolError, match=re.escape(message)):
            list(make(tmp_path, name, row).draw(WORDS))
