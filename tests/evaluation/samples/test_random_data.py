"""Random keys, strings and numbers."""

import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtool.evaluation.samples.random_data import (
    STATISTICS,
    random_calculation,
    random_numbers,
    random_pairs,
    random_string,
    spread,
    units_for,
)


def test_statistics_of_a_worked_list():
    for kind, answer in [
        ("largest number", 31),
        ("second largest number", 30),  # 31 counts once
        ("smallest number", 11),
        ("second smallest number", 12),
        ("median", 20),
    ]:
        assert STATISTICS[kind]([31, 12, 20, 31, 11, 30, 11]) == answer
        assert len(STATISTICS) == 5


@given(st.integers(0, 2**32), st.integers(0, 40))
def test_numbers_are_odd_in_number_and_begin_with_five_different_ones(seed, count):
    numbers = random_numbers(np.random.default_rng(seed), count)
    assert len(numbers) == 5 + 2 * count
    assert len(set(numbers[:5])) == 5
    assert all(10 <= number <= 99 for number in numbers)


@given(st.integers(0, 2**32), st.integers(0, 40))
def test_a_calculation_stays_from_0_to_99(seed, count):
    terms, values = random_calculation(np.random.default_rng(seed), count)
    assert len(terms) == len(values) == count + 2
    assert all(0 <= value <= 99 for value in values)
    assert [eval(" ".join(terms[: i + 1])) for i in range(len(terms))] == values


def test_there_are_more_than_enough_units():
    assert units_for(100, 3) * 3 > 100
    assert units_for(0, 5) > 0
    assert units_for(100, 0) > 100  # a tokenizer that finds nothing in a unit


def test_a_long_list_does_not_always_reach_99():
    largest = {max(random_numbers(np.random.default_rng(seed), 500)) for seed in range(20)}
    assert len(largest) > 3


def test_pairs_are_different_uuids():
    pairs = random_pairs(np.random.default_rng(0), 50)
    assert len({key for pair in pairs for key in pair}) == 100
    form = "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    assert all(re.fullmatch(form, key) for pair in pairs for key in pair)


def test_strings_keep_to_their_lengths():
    rng = np.random.default_rng(0)
    lengths = {len(random_string(rng, 3, 5)) for _ in range(50)}
    assert lengths == {3, 4, 5}


@given(
    st.integers(0, 20),
    st.lists(st.floats(0, 1, exclude_max=True), max_size=5),
)
def test_chosen_items_stand_after_their_share_of_the_filler(count, shares):
    filler, chosen = list(range(count)), [f"c{i}" for i in range(len(shares))]
    result = spread(filler, chosen, shares)
    assert [item for item in result if isinstance(item, int)] == filler
    assert len(result) == count + len(shares)
    for item, share in zip(chosen, shares, strict=True):
        before = [other for other in result[: result.index(item)] if isinstance(other, int)]
        assert len(before) == int(share * (count + 1))
