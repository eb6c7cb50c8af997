"""SCBench's tasks that read rows, on small files of the benchmark's form."""

import json

import pytest

from kvtool.errors import KvtoolError
from kvtool.evaluation.tasks.scbench import FORMS
from tests.evaluation.tasks import drawing
from tests.evaluation.tasks.counters import WORDS

OPTIONS = ["red", "blue", "green", "white"]
ADD = "def add(first, second):\n    total = first + second\n    return total\n"
READ = "def read(path):\n    with open(path) as file:\n        return file.read()\n"
NEAR = ADD.replace("    return", "    print(total)\n    return")

TURNS = {
    "repoqa": [
        {"input": "It adds.", "answer": ADD, "name": "add"},
        {"input": "It reads.", "answer": READ, "name": "read"},
    ],
    "qa_eng": [{"input": "When?", "answer": "Dark night"}, {"input": "Who?", "answer": "Anna"}],
    "qa_chn": [{"input": "谁？", "answer": "宝玉"}, {"input": "在哪？", "answer": "园中"}],
    "choice_eng": [
        {"input": "Which?", "answer": "blue", "options": OPTIONS},
        {"input": "What?", "answer": "white", "options": OPTIONS},
    ],
    "many_shot": [{"input": "Q: 1+1", "answer": "(B)"}, {"input": "Q: 2+2", "answer": "(C)"}],
    "summary": [
        {"input": "Sum up the first.", "answer": "Night came.\nDay followed."},
        {"input": "Sum up the second.", "answer": "One cat sat."},
    ],
    "summary_with_needles": [
        {"input": "Sum up.", "answer": "Night came.", "task": "scbench_summary"},
        {"input": "The key?", "answer": ["48213"], "task": "scbench_passkey"},
        {"input": "Sum up more.", "answer": "Day followed.", "task": "scbench_summary"},
    ],
    "repoqa_and_kv": [
        {"input": "It adds.", "answer": ADD, "task": "scbench_repoqa", "name": "add"},
        {"input": "Key: k", "answer": "ab-12", "task": "scbench_kv"},
    ],
}
WRONG = dict.fromkeys(TURNS, "(A) none") | {"choice_eng": "C"}
NEW_TOKENS = {
    "repoqa": [1024, 1024],
    "qa_eng": [40, 40],
    "qa_chn": [40, 40],
    "choice_eng": [40, 40],
    "many_shot": [10, 10],
    "summary": [200, 200],
    "summary_with_needles": [800, 15, 800],
    "repoqa_and_kv": [1024, 80],
}


def make(name, **settings):
    return drawing.make(f"scbench/{name}", **settings)


def write(folder, name, *rows):
    file = folder / f"scbench_{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def row(name, turns=None, **changes):
    turns = TURNS[name] if turns is None else turns
    return {"id": 0, "context": "THE TEXT", "repo": "a/b", "multi_turns": turns, **changes}


def draw(folder, name, *rows, **settings):
    task = make(name, data=write(folder, name, *(rows or [row(name)])), **settings)
    return task, list(task.draw(WORDS))


def score(task, sample, answers):
    turns = [
        {"prediction": answer, "references": list(turn.references)}
        for turn, answer in zip(sample.turns, answers, strict=True)
    ]
    return task.score({"turns": turns, "facts": json.loads(json.dumps(sample.facts))})


@pytest.mark.parametrize("name", TURNS)
def test_questions_follow_the_context_and_right_answers_score_100_and_wrong_ones_0(name, tmp_path):
    task, (sample,) = draw(tmp_path, name)
    assert sample.context.endswith("THE TEXT")
    assert [turn.max_new_tokens for turn in sample.turns] == NEW_TOKENS[name]
    for turn, asked in zip(sample.turns, TURNS[name], strict=True):
        assert turn.question.startswith("\n\n")
        assert asked["input"] in turn.question
    right = [turn.references[0] for turn in sample.turns]
    assert score(task, sample, right)["score"] == pytest.approx(100)
    assert score(task, sample, [WRONG[name]] * len(right))["score"] == 0
    assert score(task, sample, [""] * len(right))["score"] == 0
    if len(FORMS[name]) == 1:  # the mean over turns
        assert score(task, sample, [right[0], WRONG[name]]) == {"score": pytest.approx(50)}


def test_two_kinds_of_questions_weigh_the_same(tmp_path):
    task, (sample,) = draw(tmp_path, "summary_with_needles")
    # one of two summaries is right and the number is wrong
    assert score(task, sample, ["Night came.", "48214", ""]) == {
        "score": pytest.approx(25),
        "summary": pytest.approx(50),
        "passkey": 0,
    }
    assert score(task, sample, ["", "It is 48213!", ""])["score"] == 50


def test_a_kind_that_was_not_asked_for_does_not_count(tmp_path):
    task, (sample,) = draw(tmp_path, "summary_with_needles", turns=1)
    assert score(task, sample, ["Night came."]) == {
        "score": pytest.approx(100),
        "summary": pytest.approx(100),
    }


def test_options_have_letters_and_the_answer_its_own(tmp_path):
    task, (sample,) = draw(tmp_path, "choice_eng")
    assert "\nA. red\nB. blue\nC. green\nD. white\n" in sample.turns[0].question
    assert [turn.references for turn in sample.turns] == [("B. blue",), ("D. white",)]
    assert score(task, sample, ["b is wrong", " D"])["score"] == 50


def test_letter_case_is_no_matter_in_english_answers_but_every_letter_counts(tmp_path):
    task, (sample,) = draw(tmp_path, "qa_eng")
    assert score(task, sample, ["in the DARK NIGHT", "by anna"])["score"] == 100
    assert score(task, sample, ["dark", "Ann"])["score"] == 0


def test_functions_of_other_rows_of_the_repository_are_rivals(tmp_path):
    rival = row("repoqa", [{"input": "Loudly.", "answer": NEAR, "name": "near"}])
    elsewhere = {**rival, "repo": "c/d"}
    task, (sample, *_) = draw(tmp_path, "repoqa", row("repoqa"), rival)
    assert sample.facts["functions"] == [ADD, READ, NEAR]
    assert score(task, sample, [f"```python\n{ADD}```", READ])["score"] == pytest.approx(100)
    assert score(task, sample, [NEAR, READ])["score"] == pytest.approx(50)
    task, (sample, *_) = draw(tmp_path, "repoqa", row("repoqa"), elsewhere)
    assert sample.facts["functions"] == [ADD, READ]
    task, (sample,) = draw(tmp_path, "repoqa", row("repoqa"), rival, samples=1, turns=1)
    assert sample.facts["functions"] == [ADD, READ, NEAR]  # even where they are not asked for


def test_turns_and_samples_take_the_first(tmp_path):
    rows = [row("qa_eng", context=f"book {i}") for i in range(3)]
    _, samples = draw(tmp_path, "qa_eng", *rows, turns=1, samples=2)
    assert [sample.context[-6:] for sample in samples] == ["book 0", "book 1"]
    assert [len(sample.turns) for sample in samples] == [1, 1]
    assert [sample.id for sample in samples] == ["1", "2"]


def test_what_a_turn_lacks_is_named_with_its_place(tmp_path):
    for name, key in [("qa_eng", "input"), ("choice_eng", "options"), ("repoqa_and_kv", "task")]:
        turns = [dict(turn) for turn in TURNS[name]]
        turns[1].pop(key)
        with pytest.raises(KvtoolError, match=f"row 2, turn 2, lacks `{key}`"):
            draw(tmp_path, name, row(name), row(name, turns))


def test_an_unknown_kind_of_question_is_refused(tmp_path):
    turns = [{"input": "?", "answer": "!", "task": "scbench_vt"}]
    with pytest.raises(KvtoolError, match="turn 1, is of task `vt`; known: repoqa, kv"):
        draw(tmp_path, "repoqa_and_kv", row("repoqa_and_kv", turns))


def test_rouge_and_bleu_need_more_packages():
    assert set(FORMS) == set(TURNS)
    needy = {name for name in FORMS if make(name).extra}
    assert needy == {"repoqa", "repoqa_and_kv", "summary", "summary_with_needles"}
