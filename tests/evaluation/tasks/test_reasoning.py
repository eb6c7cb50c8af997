"""GSM8K, MATH-500 and AIME from small files in their published forms; what answers score."""

import json
import re

import pytest
from pydantic import ValidationError

from kvtool.documents.settings import Protocol
from kvtool.errors import KvtoolError
from kvtool.evaluation.bench.bench import Bench
from kvtool.evaluation.samples.sample import TokenCounter
from kvtool.evaluation.tasks.reasoning import FORMS, Reasoning
from kvtool.evaluation.tasks.table import TASKS, task_class
from tests.evaluation.tasks.counters import WORDS
from tests.evaluation.variants import make_variants

FULL, H2O = make_variants(["h2o"], ["20"])
THINKS = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt"
    " %}[assistant] <think>{% if enable_thinking is false %}</think>{% endif %}\n{% endif %}"
)
ROWS = {
    "gsm8k": {"question": "Three boxes of 6?", "answer": "3 * 6 = <<3*6=18>>18\n#### 18"},
    "math500": {
        "problem": "Half of one?",
        "solution": "It is $\\boxed{\\frac{1}{2}}$.",
        "answer": "\\frac{1}{2}",
        "subject": "Algebra",
        "level": 2,
        "unique_id": "test/algebra/1.json",
    },
    "aime24": {"id": 60, "problem": "Which?", "solution": "..", "answer": "073", "year": "2024"},
    "aime25": {"question": "Which?", "answer": 73},
}
RIGHT = {
    "gsm8k": ["It is 18.", "#### 18", "<think>17?</think>\n#### 18", "18.00 dollars"],
    "math500": ["\\boxed{0.5}", "<think>hm</think> $\\boxed{\\dfrac12}$"],
    "aime24": ["\\boxed{73}", "\\boxed{073}"],
    "aime25": ["\\boxed{73}", "<think>\\boxed{73}"],
}
WRONG = {
    "gsm8k": ["17", "#### 17, not 18", "<think>18", ""],
    "math500": ["\\frac{1}{2}", "\\boxed{2}", ""],
    "aime24": ["73", "\\boxed{-73}", "\\boxed{730}"],
    "aime25": ["\\boxed{73+0}", "\\boxed{}"],
}


def make(name, **settings):
    return Reasoning(name=name, **settings)


def write(folder, name, *rows):
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def score(task, sample, *answers):
    references = list(sample.turns[0].references)
    turns = [{"prediction": answer, "references": references} for answer in answers]
    return task.score(json.loads(json.dumps({"turns": turns, "facts": sample.facts})))


def test_the_table_has_the_tasks():
    assert {name for name, place in TASKS.items() if place == "reasoning:Reasoning"} == set(FORMS)
    assert set(FORMS) == set(ROWS)
    assert all(task_class(name) is Reasoning for name in FORMS)


@pytest.mark.parametrize("name", ROWS)
def test_right_answers_score_100_and_wrong_ones_0(name, tmp_path):
    task = make(name, data=write(tmp_path, name, ROWS[name]))
    (sample,) = task.draw(WORDS)
    assert [score(task, sample, answer)["pass@1"] for answer in RIGHT[name]] == [100] * len(
        RIGHT[name]
    )
    assert [score(task, sample, answer)["pass@1"] for answer in WRONG[name]] == [0] * len(
        WRONG[name]
    )


@pytest.mark.parametrize("name", ROWS)
def test_a_prompt_is_the_problem_and_how_to_answer(name, tmp_path):
    task = make(name, data=write(tmp_path, name, ROWS[name]))
    (sample,) = task.draw(WORDS)
    (turn,) = sample.turns
    assert sample.context == ""
    assert turn.question.startswith(ROWS[name].get("problem") or ROWS[name]["question"])
    assert ("####" if name == "gsm8k" else "\\boxed{}") in turn.question
    assert sample.cell == ({"level": 2} if name == "math500" else {})
    assert turn.references == ({"gsm8k": "18", "math500": "\\frac{1}{2}"}.get(name, "73"),)


def test_answers_are_as_long_as_the_benchmark_needs_or_the_model_can(tmp_path):
    data = write(tmp_path, "aime24", ROWS["aime24"])
    assert next(make("aime24", data=data).draw(WORDS)).turns[0].max_new_tokens == 32_768
    short = TokenCounter(WORDS.encode, WORDS.decode, limit=4096)
    turn = next(make("aime24", data=data).draw(short)).turns[0]
    assert turn.max_new_tokens == 4096 - len(turn.question.split()) - 256
    turn = next(make("aime24", data=data, max_new_tokens="8K").draw(short)).turns[0]
    assert turn.max_new_tokens == 8192


def test_pass_at_1_is_the_mean_over_answers_and_its_error_one_over_problems(tmp_path):
    rows = [ROWS["gsm8k"]] * 3
    task = make("gsm8k", data=write(tmp_path, "gsm8k", *rows), samples=4)
    samples = list(task.draw(WORDS))
    said = [["18"] * 4, ["18", "17", "", "18"], [""] * 4]  # 100, 50 and 0 percent
    records = [
        {
            "turns": [{"prediction": text, "references": ["18"]} for text in answers],
            "facts": sample.facts,
        }
        for sample, answers in zip(samples, said, strict=True)
    ]
    assert [task.score(record)["pass@1"] for record in records] == [100, 50, 0]
    summary = task.summarise(records)
    found = summary.metrics["pass@1"]
    assert (found.value, found.n) == (50, 3)  # 3 problems, not 12 answers
    # variance of 100, 50, 0 is 2500; sqrt(2500 / 3) = 28.87
    assert found.stderr == pytest.approx(28.8675, abs=1e-4)
    assert summary.metrics["answered"].value == pytest.approx(100 * (4 + 3 + 0) / 12)
    assert summary.parts == [(100, 1), (50, 1), (0, 1)]


def test_problems_are_the_first_rows_and_samples_are_part_of_what_is_measured(tmp_path):
    rows = [{"question": f"Problem {i}?", "answer": f"#### {i}"} for i in range(5)]
    data = write(tmp_path, "gsm8k", *rows)
    drawn = list(make("gsm8k", data=data, questions=2).draw(WORDS))
    assert [sample.turns[0].references for sample in drawn] == [("0",), ("1",)]
    more = list(make("gsm8k", data=data, questions=2, samples=2).draw(WORDS))
    assert drawn != more


def test_rows_of_another_form_are_refused_in_a_line(tmp_path):
    for name, row, message in [
        ("gsm8k", {"text": "?", "answer": "#### 1"}, "lacks column `problem`; there are: text"),
        ("gsm8k", {"question": "?"}, "lacks column `answer`; there are: question"),
        (
            "gsm8k",
            {"question": "?", "answer": "about 18"},
            "row 1: `answer` has no `#### NUMBER`",
        ),
        ("gsm8k", {"question": None, "answer": "#### 1"}, "row 1: `question` holds no text"),
        ("math500", {"problem": "?", "answer": None}, "row 1: `answer` holds no text"),
        ("aime24", {"problem": "?", "answer": "1000"}, "whole number from 0 to 999: `1000`"),
        ("aime25", {"problem": "?", "answer": "1/2"}, "whole number from 0 to 999: `1/2`"),
    ]:
        task = make(name, data=write(tmp_path, name, row))
        with pytest.raises(KvtoolError, match=re.escape(message)) as caught:
            list(task.draw(WORDS))
        assert "\n" not in str(caught.value)


def test_numbers_of_every_spelling_are_read(tmp_path):
    rows = [{"question": "?", "answer": answer} for answer in ("#### 1,000", "0", "#### 0", 2.5)]
    drawn = make("gsm8k", data=write(tmp_path, "gsm8k", *rows)).draw(WORDS)
    assert [sample.turns[0].references[0] for sample in drawn] == ["1000", "0", "0", "5/2"]


def test_several_greedy_answers_are_refused():
    with pytest.raises(ValidationError, match="3 samples at temperature 0 are all the same"):
        make("gsm8k", samples=3, temperature=0)


# ---- with a model


@pytest.fixture
def sample(tmp_path):
    data = write(tmp_path, "gsm8k", ROWS["gsm8k"])
    return next(make("gsm8k", data=data, max_new_tokens=6).draw(WORDS))


def said(task, bench, sample):
    return [turn["prediction"] for turn in task.run(bench, sample)["turns"]]


def test_one_answer_is_greedy_and_several_are_drawn_anew_each(loaded, sample):
    bench = Bench(loaded, FULL, Protocol())
    greedy = said(make("gsm8k"), bench, sample)
    assert greedy == said(make("gsm8k"), Bench(loaded, FULL, Protocol(seed=5)), sample)
    four = said(make("gsm8k", samples=4, temperature=2), bench, sample)
    assert len(set(four)) > 1
    assert four == said(make("gsm8k", samples=4, temperature=2), bench, sample)
    two = said(make("gsm8k", samples=2, temperature=2), bench, sample)
    assert two == four[:2]
    other = Bench(loaded, FULL, Protocol(seed=5))
    assert said(make("gsm8k", samples=4, temperature=2), other, sample) != four
    hot = Bench(loaded, FULL, Protocol(temperature=2.0))
    assert said(make("gsm8k", samples=4), hot, sample) == four  # that of the run


def test_every_answer_begins_with_the_prompt_alone(loaded, sample):
    """A cache of 20 tokens that has answered once is not asked again."""
    bench = Bench(loaded, H2O, Protocol())
    record = make("gsm8k", samples=3).measure(bench, sample)
    once = make("gsm8k").measure(bench, sample)
    assert record["cost"]["prompt_tokens"] == 3 * once["cost"]["prompt_tokens"]
    assert record["cost"]["kept_tokens"] == once["cost"]["kept_tokens"] == 20


def test_the_question_is_always_known():
    assert make("gsm8k").knows_query(Protocol(query_aware=False))


@pytest.fixture
def thinker(loaded):
    before = loaded.tokenizer.chat_template
    loaded.tokenizer.chat_template = THINKS
    yield loaded
    loaded.tokenizer.chat_template = before


def test_a_thought_that_the_template_opens_is_part_of_the_answer(thinker, sample):
    bench = Bench(thinker, FULL, Protocol())
    (answer,) = said(make("gsm8k"), bench, sample)
    assert answer.startswith("<think>")
    assert not said(make("gsm8k", thinking=False), bench, sample)[0].startswith("<think>")
    assert said(make("gsm8k", thinking=True), bench, sample) == [answer]
    off = Bench(thinker, FULL, Protocol(chat_template="off"))
    assert not said(make("gsm8k"), off, sample)[0].startswith("<think>")
