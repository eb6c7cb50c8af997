"""InfiniteBench's tasks that read rows, on small files of the benchmark's form."""

import json

import pytest

from kvtool.errors import KvtoolError
from kvtool.evaluation.tasks.infinitebench import FORMS, speaks
from tests.evaluation.tasks import drawing
from tests.evaluation.tasks.counters import WORDS

OPTIONS = ["parse", "read", "write", "close"]
BOOK = "It was a dark night. Then came the day."
ROWS = {
    "longbook_qa_eng": {"input": "When?", "answer": ["the dark night", "midnight"]},
    "longbook_qa_chn": {"input": "谁？", "answer": ["宝玉"]},
    "longbook_sum_eng": {"input": "", "answer": ["Night came.\nDay followed."]},
    "longbook_choice_eng": {"input": "What?", "answer": ["read"], "options": OPTIONS},
    "longdialogue_qa_eng": {"input": "", "answer": ["MRS SMITH", "SMITH"]},
    "code_debug": {"input": "", "answer": ["read", "B"], "options": OPTIONS},
}
RIGHT = {
    "longbook_qa_eng": "Midnight.",
    "longbook_qa_chn": "宝玉。",
    "longbook_sum_eng": "night came\nday followed",
    "longbook_choice_eng": " B",
    "longdialogue_qa_eng": "Mrs Smith:",
    "code_debug": " B. read",
}
WRONG = dict.fromkeys(ROWS, "C. none") | {"longbook_qa_chn": "黛母"}
HALF = {
    "longbook_qa_eng": ("at night", 50),  # of "dark night" 1 of 2 words, and 1 of 2 said
    "longbook_qa_chn": ("黛玉", 50),
    "longbook_sum_eng": ("Night came.", 200 / 3),  # precision 1, recall 1/2
}
NEW_TOKENS = dict(zip(ROWS, (40, 40, 1200, 40, 40, 5), strict=True))


def make(name, **settings):
    return drawing.make(f"infinitebench/{name}", **settings)


def write(folder, name, *rows):
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def row(name, **changes):
    return {"id": 7, "context": BOOK, "options": [], **ROWS[name], **changes}


def score(task, sample, answer):
    return drawing.score(task, sample, answer)["score"]


@pytest.mark.parametrize("name", ROWS)
def test_a_question_follows_the_context_and_right_answers_score_100_and_wrong_ones_0(
    name, tmp_path
):
    task = make(name, data=write(tmp_path, name, row(name)))
    (sample,) = task.draw(WORDS)
    (turn,) = sample.turns
    assert sample.context.endswith(f"\n\n{BOOK}")
    assert turn.question.startswith("\n\n")
    assert ROWS[name]["input"] in turn.question
    assert turn.max_new_tokens == NEW_TOKENS[name]
    if "options" in ROWS[name]:
        assert "\nA. parse\nB. read\nC. write\nD. close\n" in turn.question
    assert score(task, sample, RIGHT[name]) == 100
    assert score(task, sample, sample.turns[0].references[0]) == 100
    assert score(task, sample, WRONG[name]) == 0
    assert score(task, sample, "") == 0
    if name in HALF:
        answer, expected = HALF[name]
        assert score(task, sample, answer) == pytest.approx(expected)


def test_a_summary_is_compared_word_by_word_not_by_stems(tmp_path):
    task = make(
        "longbook_sum_eng", data=write(tmp_path, "longbook_sum_eng", row("longbook_sum_eng"))
    )
    (sample,) = task.draw(WORDS)
    assert score(task, sample, "nights coming\ndays following") == 0


def test_names_of_a_play_are_whole_words():
    assert speaks("It is Mrs. Smith, I think", "MRS SMITH") == 1
    assert speaks("Mrs and Mr Smith", "MRS SMITH") == 0
    assert speaks("Smithers", "SMITH") == 0


def test_braces_in_a_question_stay(tmp_path):
    name = "longbook_qa_eng"
    task = make(name, data=write(tmp_path, name, row(name, input="What is {options}?")))
    assert "What is {options}?" in next(task.draw(WORDS)).turns[0].question


def test_samples_are_the_first_rows(tmp_path):
    rows = [row("longbook_qa_eng", context=f"Book {i}") for i in range(5)]
    task = make("longbook_qa_eng", data=write(tmp_path, "longbook_qa_eng", *rows), samples=2)
    assert [sample.context[-6:] for sample in task.draw(WORDS)] == ["Book 0", "Book 1"]
    everything = list(task.model_copy(update={"samples": None}).draw(WORDS))
    assert [sample.id for sample in everything] == ["1", "2", "3", "4", "5"]


def test_an_empty_value_is_named_with_its_row(tmp_path):
    rows = [row("code_debug"), row("code_debug", options=None)]
    task = make("code_debug", data=write(tmp_path, "code_debug", *rows))
    with pytest.raises(KvtoolError, match=r"code_debug\.jsonl` row 2 lacks `options`"):
        list(task.draw(WORDS))


def test_only_the_summary_needs_more_packages():
    assert set(FORMS) == set(ROWS)
    assert {name for name in FORMS if make(name).extra} == {"longbook_sum_eng"}
