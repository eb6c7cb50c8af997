"""Fitting: the largest sample within a length, found with few looks at the tokenizer."""

import numpy as np
import pytest

from kvtool.errors import UsageError
from kvtool.evaluation.samples.fit import fit, generator, longest, needed_tokens
from kvtool.evaluation.samples.sample import Sample, TokenCounter, Turn
from tests.evaluation.tokenizers import WORDS


def true_longest(sizes, room):
    """Try every number of units."""
    return max(n for n in range(len(sizes) + 1) if sum(sizes[:n]) <= room)


def looked_for(sizes, weights, room):
    """How many units are found to fit, and how often the tokenizer is asked."""
    looks = []

    def size(n):
        looks.append(n)
        return 7 + sum(sizes[:n])

    return longest(size, weights, 7 + room), len(looks)


def test_the_most_units_that_fit_are_found_where_weights_are_true():
    rng = np.random.default_rng(0)
    for _ in range(30):
        sizes = rng.integers(1, 30, rng.integers(1, 200)).tolist()
        room = int(rng.integers(0, sum(sizes) + 10))
        found, looks = looked_for(sizes, sizes, room)
        assert found == true_longest(sizes, room)
        assert looks <= 3


@pytest.mark.parametrize("factor", [0.2, 0.8, 1.3, 5])
def test_weights_that_are_off_cost_looks_but_never_overflow(factor):
    rng = np.random.default_rng(0)
    for _ in range(5):
        sizes = rng.integers(5, 30, 500).tolist()
        weights = [max(1, round(size * factor)) for size in sizes]
        room = int(rng.integers(0, 5000))
        found, looks = looked_for(sizes, weights, room)
        assert sum(sizes[:found]) <= room
        assert true_longest(sizes, room) - found <= 1
        assert looks <= 12


def test_fixed_weights_are_enough():
    sizes = np.random.default_rng(0).integers(5, 30, 5000).tolist()
    found, looks = looked_for(sizes, [1] * 5000, 40_000)
    assert true_longest(sizes, 40_000) - found <= 1
    assert looks <= 12


def test_no_unit_and_all_units():
    assert longest(lambda n: 10 * n, [10, 10], 9) == 0
    assert longest(lambda n: 10 * n, [10, 10], 1000) == 2
    assert longest(lambda n: 0, [], 10) == 0


def build(n):
    return Sample(str(n), " a" * n, (Turn(" b c", ("d",), 5, " e"),))


def test_a_sample_needs_its_text_the_special_tokens_and_the_longest_answer():
    assert needed_tokens(build(4), WORDS) == 4 + 2 + 1 + 5
    special = TokenCounter(WORDS.encode, WORDS.decode, special=3)
    assert needed_tokens(build(4), special) == 3 + 4 + 2 + 1 + 5


def test_tokens_are_counted_over_the_joined_text():
    joined = Sample("", "a", (Turn("b", (), 0, "c"),))  # one word: abc
    assert needed_tokens(joined, WORDS) == 1


def test_a_sample_fills_its_length():
    sample = fit(build, [1] * 100, 50, WORDS, "trial")
    assert sample == build(42)
    assert fit(build, [1] * 3, 50, WORDS, "trial") == build(3)
    assert fit(build, [1] * 100, 8, WORDS, "trial") == build(0)


def test_refuses_a_length_without_room_for_the_question():
    with pytest.raises(UsageError, match="trial: length 7 is too short, a sample takes 8") as error:
        fit(build, [1] * 100, 7, WORDS, "trial")
    assert error.value.hint == "use lengths of 8 or more"


def test_numbers_depend_on_seed_and_place_only():
    def draw(*place):
        return generator(*place).integers(0, 2**62, 3).tolist()

    places = [(0, "niah", 512, 50, 1), (1, "niah", 512, 50, 1), (0, "niah", 512, 50, 2)]
    places += [(0, "niah", 5125, 0, 1), (0, "niah", 512, 5, 1), (0, "ruler", 512, 50, 1)]
    drawn = [draw(*place) for place in places]
    assert drawn == [draw(*place) for place in places]
    assert len({tuple(numbers) for numbers in drawn}) == len(places)
