"""Chains of sums: what is asked, and which lines of an answer follow it."""

import re

import pytest

from kvtool.documents.settings import Protocol
from tests.evaluation.tasks.drawing import draw, make, score
from tests.evaluation.tokenizers import COUNTERS, REFERENCE

NAME = "chain"
FORMS = (
    "{n}. {a} {sign} {b} = {c}",
    "{a} {sign} {b} = {c}",
    "- {a} {sign} {b} = {c}",
    "{n}) {a}{sign}{b}={c}.",
    "Step {n}: {a} {word} {b} is {c}",
    "**Step {n}.** Take {b} and {a}: **{a} {sign} {b} = {c}**",
    "{n}\\. \\( {a} {sign} {b} = \\boxed{{{c}}} \\)",
    "### Step {n}\nSo we do it:\n$({a} {sign} {b}) = {c}$\n",
    "{n}. {a} − {b} = {c}",
)


def solve(sample):
    """Work out every step from the text of the question: (before, sign, number, after)."""
    (turn,) = sample.turns
    value = int(re.match(r"Start with (\d+)", turn.question)[1])
    steps = []
    for word, number in re.findall(r"\d+\. (add|subtract) (\d+)\n", turn.question):
        after = value + int(number) if word == "add" else value - int(number)
        steps.append((value, "+" if word == "add" else "-", int(number), after))
        value = after
    return steps


def written(steps, form=FORMS[0]):
    lines = []
    for n, (a, sign, b, c) in enumerate(steps, 1):
        own = form.replace("−", "-" if sign == "-" else "+") if sign == "+" else form
        word = {"+": "plus", "-": "minus"}[sign]
        lines.append(own.format(n=n, a=a, sign=sign, word=word, b=b, c=c))
    return "\n".join(lines)


@pytest.fixture
def task():
    return make(NAME, depths=6, samples=1)


@pytest.fixture
def sample(task):
    (sample,) = task.draw(REFERENCE)
    return sample


@pytest.mark.parametrize("depth", [1, 14, 100])
def test_a_solver_that_reads_the_text_is_right(depth):
    task = make(NAME, depths=depth, samples=5)
    for sample in task.draw(REFERENCE):
        steps = solve(sample)
        assert sample.cell == {"depth": depth} == {"depth": len(steps)}
        assert all(0 <= after <= 99 and 2 <= number <= 9 for _, _, number, after in steps)
        assert score(task, sample, written(steps)) == {"steps": 1.0, "em": 1.0}
        # the answer goes on from the `1.` that it is given
        assert sample.turns[0].answer_prefix == "1."
        goes_on = written(steps).removeprefix("1.")
        assert score(task, sample, goes_on) == {"steps": 1.0, "em": 1.0}


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_read_in_the_forms_that_models_write(task, sample, form):
    assert score(task, sample, written(solve(sample), form)) == {"steps": 1.0, "em": 1.0}


def test_a_wrong_sum_costs_none_of_the_steps_after_it(task, sample):
    steps, slip, value = solve(sample), [], None
    for i, (before, sign, number, _) in enumerate(steps):
        before = before if value is None else value
        value = (before + number if sign == "+" else before - number) + (i == 2)
        slip.append((before, sign, number, value))
    assert slip[-1][-1] == steps[-1][-1] + 1
    assert score(task, sample, written(slip)) == {"steps": 1.0, "em": 0.0}


def test_a_line_needs_the_result_before_it_and_its_step(task, sample):
    steps = solve(sample)
    before, sign, number, after = steps[3]
    other = {"+": "-", "-": "+"}[sign]
    for wrong in [(before + 1, sign, number), (before, other, number), (before, sign, number + 1)]:
        lines = [*steps[:3], (*wrong, after), *steps[4:]]
        assert score(task, sample, written(lines)) == {"steps": 5 / 6, "em": 1.0}
    # where its own result is another one, the next line has to take that over
    lines = [*steps[:3], (before, sign, number, after + 1), *steps[4:]]
    assert score(task, sample, written(lines)) == {"steps": 5 / 6, "em": 1.0}


def test_lines_that_are_missing_or_said_again_count_once(task, sample):
    steps = solve(sample)
    text = written(steps).splitlines()
    assert score(task, sample, "") == {"steps": 0.0, "em": 0.0}
    assert score(task, sample, "\n".join(text[:3])) == {"steps": 0.5, "em": 0.0}
    # of a skipped step the number says so, and the next line takes over another result
    assert score(task, sample, "\n".join(text[:2] + text[3:])) == {"steps": 4 / 6, "em": 1.0}
    # what comes later changes nothing: more steps, or the same ones again
    more = [*text, f"7. {steps[-1][-1]} + 1 = 0", *text, "2. 1 + 1 = 2"]
    assert score(task, sample, "\n".join(more)) == {"steps": 1.0, "em": 1.0}
    first = ["2. 1 + 1 = 2", *text]
    assert score(task, sample, "\n".join(first)) == {"steps": 4 / 6, "em": 1.0}
    # a number that never ends is none of a step
    endless = ["9" * 5000 + ". 1 + 1 = 2", *text]
    assert score(task, sample, "\n".join(endless)) == {"steps": 5 / 6, "em": 1.0}


def test_sums_in_one_line_and_thoughts(task, sample):
    steps = solve(sample)
    chained = str(steps[0][0]) + "".join(f" {sign} {b} = {c}" for _, sign, b, c in steps)
    assert score(task, sample, chained) == {"steps": 1.0, "em": 1.0}
    thought = f"<think>1. 1 + 1 = 2</think>{written(steps)}"
    assert score(task, sample, thought) == {"steps": 1.0, "em": 1.0}


def test_results_below_zero_are_taken_over(task, sample):
    steps = solve(sample)
    _, sign, number, after = steps[1]
    lines = [(*steps[0][:3], -5), (-5, sign, number, after), *steps[2:]]
    assert score(task, sample, written(lines)) == {"steps": 1.0, "em": 1.0}


def test_there_is_room_for_the_whole_answer_and_half_more():
    for tokens in COUNTERS.values():
        (sample,) = draw(NAME, tokens, samples=1)
        answer = tokens.count(written(solve(sample)) + "\n")
        assert sample.turns[0].max_new_tokens == pytest.approx(1.5 * answer, abs=0.5)


def test_a_sample_does_not_depend_on_what_else_is_drawn():
    few = draw(NAME, REFERENCE, depths=[14], samples=2)
    many = {sample.id: sample for sample in draw(NAME, REFERENCE, depths="4,14", samples=4)}
    assert len(many) == 8
    assert all(many[sample.id] == sample for sample in few)
    assert len({sample.turns for sample in many.values()}) == 8
    other = draw(NAME, REFERENCE, depths=[14], samples=2, seed=1)
    assert all(a.turns != b.turns for a, b in zip(few, other, strict=True))


def test_the_question_is_always_known(task):
    assert task.reasons
    assert task.knows_query(Protocol(query_aware=False))
