"""Variable tracking: one chain in noise, in order, and what an oracle scores."""

import re

from kvtool.evaluation.tasks.ruler import assignments
from kvtool.models.reference import facts
from kvtool.models.reference.vocabulary import TOKEN_ID, decode, encode
from tests.evaluation.tasks.drawing import check_drawing, check_fill, draw, make, score
from tests.evaluation.tokenizers import COUNTERS, REFERENCE

NAME = "ruler/vt"
FACT = re.compile(r" The value (?:from )?(\w+): (\w+)\.")


def test_samples_fill_their_length():
    for length, counter in [(256, "reference"), (1024, "words"), (8192, "marked")]:
        check_fill(NAME, COUNTERS[counter], length, 20)


def test_a_sample_does_not_depend_on_what_else_is_drawn():
    check_drawing(NAME, REFERENCE)


def test_the_wording_is_that_of_the_reference_model():
    names = ["BA", "CE", "DI"]
    ids = [TOKEN_ID[f" {name}"] for name in names]
    value = encode(" 48213")
    assert assignments(48213, names) == [decode(fact) for fact in facts.assignments(value, ids)]
    (sample,) = draw(NAME, REFERENCE, samples=1)
    (turn,) = sample.turns
    value = re.search(r"(\d+)\?", turn.question)[1]
    expected = facts.ask_variables(
        encode(f" {value}"), [TOKEN_ID[f" {n}"] for n in turn.references]
    )
    assert turn.question + turn.answer_prefix == decode(expected.prompt)


def follow(sample):
    """Read off who holds the value that is asked for, hop by hop."""
    hops = dict(FACT.findall(sample.context))
    at = re.search(r"(\d+)\?", sample.turns[0].question)[1]
    assert 10_000 <= int(at) <= 99_998
    names = []
    while at in hops:
        at = hops[at]
        names.append(at)
    return names


def test_right_partial_and_wrong_answers():
    task = make(NAME, lengths=700, samples=5)
    for sample in task.draw(REFERENCE):
        stated = FACT.findall(sample.context)
        names = follow(sample)
        assert names == [name for _, name in stated] == list(sample.turns[0].references)
        assert len(set(names)) == 5
        assert score(task, sample, f" {' '.join(names)}.") == {"string_match_all": 100.0}
        assert score(task, sample, f" {', '.join(names[:2])}") == {"string_match_all": 40.0}
        assert score(task, sample, " ".join(names).lower()) == {"string_match_all": 0.0}
        assert score(task, sample, "") == {"string_match_all": 0.0}
        assert sample.turns[0].max_new_tokens == 30
