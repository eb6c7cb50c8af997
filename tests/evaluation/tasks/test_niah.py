"""The needle in a haystack: lengths, depths, scores, and the reference model's own answers."""

import re

import numpy as np
import pytest
from pydantic import ValidationError

from kvtool.cache.hooks.attach import attach
from kvtool.documents.settings import Protocol
from kvtool.errors import UsageError
from kvtool.evaluation.bench.bench import Bench
from kvtool.evaluation.samples.needles import CITIES
from kvtool.evaluation.samples.needles import NAMES as NAMES_OF_PEOPLE
from kvtool.evaluation.samples.sample import token_counter
from kvtool.models.load import load
from kvtool.planning.variants import Variant
from kvtool.policies.grammar import parse_policy
from tests.evaluation.tasks.drawing import check_drawing, check_fill, draw, make, score
from tests.evaluation.tokenizers import COUNTERS, REFERENCE, WORDS

NAMES = ["niah", "niah/passkey", "niah/city"]
NEEDLES = {
    "niah": r" The secret code for \w+: (\d{7})\.",
    "niah/passkey": r" The pass key is (\d{7})\. Remember it: \1 is the pass key\.",
    "niah/city": r" [A-Z][a-z]+ now lives in the city of ([A-Z][a-z]+)\.",
}


@pytest.mark.parametrize("name", NAMES)
def test_samples_fill_their_length_to_a_sentence(name):
    for length, counter in [(256, "reference"), (1024, "words"), (8192, "marked")]:
        check_fill(name, COUNTERS[counter], length, 30, depths=[50])


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_does_not_depend_on_what_else_is_drawn(name):
    check_drawing(name, REFERENCE, depths=3)
    three = draw(name, REFERENCE, lengths=512, depths=3)
    assert draw(name, REFERENCE, lengths=512, depths=[50]) == [three[1]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("source", ["builtin", "noise"])
def test_the_needle_stands_once_where_its_share_has_passed(name, source):
    samples = draw(name, REFERENCE, lengths=[512, 2048], depths=5, haystack=source)
    assert [sample.cell["depth"] for sample in samples] == [0, 25, 50, 75, 100] * 2
    assert samples[7].id == "length=2048/depth=50/0"
    for sample in samples:
        (found,) = re.finditer(NEEDLES[name], sample.context)
        assert found[1] == sample.turns[0].references[0]
        assert sample.context.count(found[1]) == found[0].count(found[1])
        before, after = sample.context[: found.start()], sample.context[found.end() :]
        hay = REFERENCE.count(before + after)
        passed = 100 * REFERENCE.count(before) / hay if before else 0
        assert sample.cell["depth"] <= passed < sample.cell["depth"] + 100 * 25 / hay
        assert before == "" or before.endswith(".")


def test_samples_in_a_text_of_ones_own_begin_at_drawn_sentences(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text(" ".join(f"Line {number} ends." for number in range(500)))
    settings = {"lengths": 100, "depths": [100], "haystack": str(file)}
    samples = draw("niah", WORDS, samples=8, **settings)
    firsts = [sample.context.split(".")[0] for sample in samples]
    assert len(set(firsts)) > 5
    assert firsts[:3] == [
        sample.context.split(".")[0] for sample in draw("niah", WORDS, samples=3, **settings)
    ]
    versions = [make(name, haystack=str(file)).version for name in (*NAMES, "ruler/niah_single_2")]
    assert versions == [2] * 4
    assert make("niah").version == make("niah", haystack="noise").version == 1


def test_the_default_grid():
    samples = draw("niah", WORDS)
    assert len(samples) == 33
    assert {sample.cell["length"] for sample in samples} == {512, 1024, 2048}
    assert [sample.cell["depth"] for sample in samples[:11]] == list(range(0, 101, 10))


def test_depths_are_a_number_or_percentages():
    assert make("niah", depths=4).depths == (0, 33.3, 66.7, 100)
    assert make("niah", depths="3").depths == (0, 50, 100)
    assert make("niah", depths="10,20.5").depths == (10, 20.5)
    assert make("niah", depths=1).depths == (50,)
    assert make("niah", depths="50%").depths == (50,)
    assert make("niah", depths="0%,12.5 %,100").depths == (0, 12.5, 100)
    assert make("niah", depths=["25%", 50]).depths == (25, 50)
    assert make("niah", depths=[100, 0]).depths == (100, 0)
    dumped = make("niah", depths=4).model_dump(mode="json")
    assert make(**dumped) == make("niah", depths=4)


def test_refuses_depths_without_meaning():
    for depths in (0, -1, 1002, [101], [-1], "50%%", "150%", "deep", None, []):
        with pytest.raises(ValidationError, match="depths must be a number up to 1001 or perce"):
            make("niah", depths=depths)


def test_refuses_a_length_without_room_for_the_needle():
    for name in NAMES:
        with pytest.raises(
            UsageError, match=rf"{name}: length 40 is too short, a sample takes \d+"
        ):
            draw(name, REFERENCE, lengths=40)


@pytest.mark.parametrize("name", NAMES[:2])
def test_scores_of_right_and_wrong_answers(name):
    task = make(name, lengths=300, depths=[50])
    (sample,) = task.draw(REFERENCE)
    (number,) = sample.turns[0].references
    right = {"em": 1.0, "word_set": 1.0}
    assert score(task, sample, f" {number}.") == right
    assert score(task, sample, f"It is {number[0]},{number[1:4]},{number[4:]}, I think") == right
    assert score(task, sample, f"9{number}") == {"em": 1.0, "word_set": 0.0}
    for wrong in ("", number[:6], sample.turns[0].question):
        assert score(task, sample, wrong) == {"em": 0.0, "word_set": 0.0}
    assert (task.metric, task.best) == ("em", 1.0)


def test_a_city_is_found_in_any_case_and_wording():
    task = make("niah/city", lengths=300, depths=[50])
    (sample,) = task.draw(REFERENCE)
    (city,) = sample.turns[0].references
    assert score(task, sample, f" {city}.") == {"em": 1.0, "word_set": 1.0}
    assert score(task, sample, f"It is {city.upper()}, I think")["em"] == 1.0
    assert score(task, sample, city[:-1])["em"] == 0.0
    assert len({s.turns[0].references for s in draw("niah/city", WORDS, lengths=100)}) > 5


def test_names_and_cities_are_different_single_words():
    for words in (NAMES_OF_PEOPLE, CITIES):
        assert len(set(words)) == len(words) > 40
        assert all(word.isalpha() for word in words)
    assert not set(NAMES_OF_PEOPLE) & set(CITIES)


def test_numbers_have_the_digits_that_are_asked_for():
    samples = draw("niah", WORDS, lengths=100, digits=4)
    assert all(re.fullmatch(r"[1-9]\d{3}", s.turns[0].references[0]) for s in samples)
    assert draw("niah", WORDS, lengths=100, digits=7) == draw("niah", WORDS, lengths=100)
    for digits in (0, 16):
        with pytest.raises(ValidationError, match="digits"):
            make("niah", digits=digits)
    with pytest.raises(ValidationError, match="digits"):
        make("niah/city", digits=4)


def test_numbers_are_spread():
    numbers = [int(s.turns[0].references[0]) for s in draw("niah", WORDS, lengths=100, samples=20)]
    assert np.mean(numbers) == pytest.approx(5.5e6, abs=6e5)


def test_the_reference_model_finds_needles_with_a_full_cache():
    loaded = load()
    attach(loaded.model)
    bench = Bench(loaded, Variant(parse_policy("full"), None), Protocol())
    for name, settings in [("niah", {"depths": 5}), ("ruler/niah_multikey_1", {"samples": 5})]:
        task = make(name, lengths=512, **settings)
        samples = list(task.draw(token_counter(bench.tokenizer, 8192)))
        assert len(samples) == 5
        records = [task.measure(bench, sample) for sample in samples]
        assert task.summarise(records).metrics[task.metric].value >= 0.8 * task.best
