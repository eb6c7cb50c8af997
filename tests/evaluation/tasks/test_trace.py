"""Chains of steps: what a solver that reads the text writes, and what partial answers score."""

import re

import pytest

from kvtool.errors import KvtoolError
from tests.evaluation.tasks.drawing import draw, make, score
from tests.evaluation.tokenizers import COUNTERS, REFERENCE

NAME = "trace"
PAIR = re.compile(r" (\w+): (\w+)")


def solve(sample):
    """Work out every variable from the text alone: (name, source, word of it, word after it)."""
    words, listed = (
        dict(PAIR.findall(part)) for part in re.split(" Words:|\n List:", sample.context)[1:]
    )
    held = {name: word for name, word in listed.items() if word.islower()}
    steps = []
    for name, source in listed.items():
        if name not in held:
            held[name] = words[held[source]]
            steps.append((name, source, held[source], held[name]))
    return steps


def written(steps):
    return "".join(f" {a}: {b} {word}: {after} {a} {after}" for a, b, word, after in steps) + "."


@pytest.mark.parametrize("depth", [1, 4, 32, 117])
def test_a_solver_that_reads_the_text_is_right(depth):
    task = make(NAME, depths=depth, samples=3)
    for sample in task.draw(REFERENCE):
        steps = solve(sample)
        assert sample.cell == {"depth": depth} == {"depth": len(steps)}
        (turn,) = sample.turns
        assert turn.references == tuple(f"{name} {after}" for name, _, _, after in steps)
        assert f"value for {steps[-1][0]}? Answer:" in turn.question
        assert score(task, sample, written(steps)) == {"em": 1.0, "steps": 1.0}


def test_right_partial_and_wrong_answers():
    task = make(NAME, depths=8, samples=1)
    (sample,) = task.draw(REFERENCE)
    steps = solve(sample)
    name, source, before, after = steps[-1]
    wrong = (name, source, before, before)
    assert score(task, sample, written([*steps[:-1], wrong])) == {"em": 0.0, "steps": 7 / 8}
    assert score(task, sample, written(steps[:4])) == {"em": 0.0, "steps": 0.5}
    assert score(task, sample, f"{name} {after}") == {"em": 1.0, "steps": 1 / 8}
    assert score(task, sample, f"{name}: {after}.\n Done") == {"em": 1.0, "steps": 1 / 8}
    # what is said first counts, not what a later step says of it
    assert score(task, sample, f"{name} {before} {name} {after}") == {"em": 0.0, "steps": 0.0}
    assert score(task, sample, "") == {"em": 0.0, "steps": 0.0}


def test_steps_need_what_was_written_long_before():
    """Half of the variables follow the one before; of the others, many go back far."""
    back = []
    for sample in draw(NAME, REFERENCE, depths=64, samples=20):
        names = [name for name, _ in PAIR.findall(sample.context.split("List:")[1])]
        back += [names.index(a) - names.index(b) for a, b, _, _ in solve(sample)]
    assert 0.45 < sum(distance == 1 for distance in back) / len(back) < 0.65
    assert sum(distance > 16 for distance in back) / len(back) > 0.15
    assert min(back) == 1


def test_there_is_room_for_the_whole_answer_and_a_quarter_more():
    for counter in COUNTERS:
        tokens = COUNTERS[counter]
        for sample in draw(NAME, tokens, depths=[4, 64], samples=2):
            answer = tokens.count(written(solve(sample)))
            assert sample.turns[0].max_new_tokens == pytest.approx(1.25 * answer, abs=0.5)


def test_of_64_steps_the_answer_is_twice_the_prompt():
    (sample,) = draw(NAME, REFERENCE, depths=64, samples=1)
    prompt = REFERENCE.special + REFERENCE.count(sample.context + sample.turns[0].question)
    assert (prompt, REFERENCE.count(written(solve(sample)))) == (178, 385)


def test_a_sample_does_not_depend_on_what_else_is_drawn():
    few = draw(NAME, REFERENCE, depths=[32], samples=2)
    many = {sample.id: sample for sample in draw(NAME, REFERENCE, depths="4,32", samples=4)}
    assert len(many) == 8
    assert all(many[sample.id] == sample for sample in few)
    assert len({sample.context for sample in many.values()}) == 8
    other = draw(NAME, REFERENCE, depths=[32], samples=2, seed=1)
    assert all(a.context != b.context for a, b in zip(few, other, strict=True))


def test_a_worked_example_goes_before_on_demand():
    (plain,) = draw(NAME, REFERENCE, depths=4, samples=1)
    (shown,) = draw(NAME, REFERENCE, depths=4, samples=1, example=True)
    example = shown.context.removesuffix(plain.context)
    assert shown.turns == plain.turns
    context, _, answer = re.split("\n Question:|Answer:", example)
    assert answer == written(solve(type(plain)("example", context))) + "\n"


def test_chains_that_there_are_no_names_for_are_refused():
    for depths in [0, 118, [4, 1000]]:
        with pytest.raises((KvtoolError, ValueError), match=r"1 to 117 steps|greater than"):
            make(NAME, depths=depths)
