import doctest
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtool.errors
import kvtool.sizes
from kvtool.errors import UsageError
from kvtool.sizes import MOST_TOKENS, Budget, fraction_of, parse_count, parse_prefill

ratios = st.fractions(min_value=0, max_value=1).filter(lambda ratio: ratio > 0)
budgets = st.one_of(
    st.integers(1, MOST_TOKENS).map(lambda n: Budget(tokens=n)),
    ratios.map(lambda ratio: Budget(ratio=ratio)),
    st.integers(1, 2**60).map(lambda n: Budget(bytes=n)),
)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("4096", Budget(tokens=4096)),
        ("4K", Budget(tokens=4096)),
        ("0.5K", Budget(tokens=512)),
        (" 512 ", Budget(tokens=512)),
        (512, Budget(tokens=512)),
        ("1", Budget(tokens=1)),
        ("1.0", Budget(ratio=Fraction(1))),
        (1.0, Budget(ratio=Fraction(1))),
        ("100%", Budget(ratio=Fraction(1))),
        ("20%", Budget(ratio=Fraction(1, 5))),
        ("0.2", Budget(ratio=Fraction(1, 5))),
        (".2", Budget(ratio=Fraction(1, 5))),
        (0.1, Budget(ratio=Fraction(1, 10))),
        ("12.5 %", Budget(ratio=Fraction(1, 8))),
        ("1/3", Budget(ratio=Fraction(1, 3))),
        ("64MiB", Budget(bytes=64 * 2**20)),
        ("64mib", Budget(bytes=64 * 2**20)),
        ("1.5 GiB", Budget(bytes=3 * 2**29)),
        ("100B", Budget(bytes=100)),
        (Budget(tokens=7), Budget(tokens=7)),
    ],
)
def test_reads_what_people_type(text, budget):
    assert Budget.parse(text) == budget


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("4k", "lower-case `k` in `4k` is ambiguous", "use `4K`"),
        ("0", "budget 0 is not above 0", "512"),
        ("-5", "budget -5 is not above 0", "512"),
        ("0%", "budget 0 is not above 0", "20%"),
        ("-0.5", "budget -0.5 is not above 0", "20%"),
        ("0B", "budget 0 is not above 0", "64MiB"),
        ("150%", "budget ratio 1.5 is above 1", None),
        ("2.5", "budget ratio 2.5 is above 1", None),
        ("64MB", "`MB` may mean 1000 or 1024", "use `64MiB`"),
        ("much", "`much` is not a size", "64MiB"),
        ("", "`` is not a size", "64MiB"),
        ("nan", "`nan` is not a size", "64MiB"),
        (float("inf"), "`inf` is not a size", "64MiB"),
        ("12parsecs", "budget `12parsecs` is not a size", "64MiB"),
        ("0.3K", "budget `0.3K` is not a whole number of tokens", None),
        ("1/0", "`1/0` divides by zero", None),
        ("9" * 5000, f"`{'9' * 200}...` is not a size", "64MiB"),
        pytest.param(10**5000, "a number of 5001 digits is not a size", "64MiB", id="beyond text"),
        ("2147483648", "budget `2147483648` is above 2147483647", None),
        ("9e30TiB", "is above 9223372036854775807 (bytes)", None),
        ("１２", "`１２` is not a size", "64MiB"),
        (None, "budget `None` is not a size", "64MiB"),
        (True, "budget `True` is not a size", "64MiB"),
    ],
)
def test_refuses_what_is_no_budget(text, message, hint):
    with pytest.raises(UsageError) as refused:
        Budget.parse(text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    if hint is None:
        assert refused.value.hint is None
    else:
        assert hint in refused.value.hint


def test_a_budget_is_one_thing():
    with pytest.raises(UsageError, match="got 0 of them"):
        Budget()
    with pytest.raises(UsageError, match="got 2 of them"):
        Budget(tokens=4, bytes=4)


@pytest.mark.parametrize(("text", "count"), [("128", 128), ("32K", 32768), ("1M", 2**20), (7, 7)])
def test_reads_counts(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["4k", "0.3", "20%", "64MiB", "many", "1e15", "9999M"])
def test_refuses_what_is_no_count(text):
    with pytest.raises(UsageError, match=text):
        parse_count(text)


@given(budgets)
def test_the_canonical_spelling_reads_back(budget):
    assert Budget.parse(str(budget)) == budget


@given(ratios, st.integers(1, 10**9))
def test_fraction_of_is_the_exact_floor(ratio, n):
    kept = fraction_of(ratio, n)
    assert kept == max(1, (ratio * n).__floor__())
    assert 1 <= kept <= n


@given(st.integers(1, 100), st.integers(1, 10**6))
def test_a_percentage_keeps_what_it_says(percent, n):
    assert Budget.parse(f"{percent}%").for_prompt(n) == max(1, percent * n // 100)


def test_floats_do_not_lose_a_token():
    assert fraction_of(Fraction("0.29"), 100) == 29  # int(0.29 * 100) is 28
    assert Budget.parse(0.29).for_prompt(100) == 29


def test_bytes_need_a_model():
    with pytest.raises(UsageError, match="bytes needs a model"):
        Budget.parse("1MiB").for_prompt(100)


@pytest.mark.parametrize("module", [kvtool.errors, kvtool.sizes])
def test_examples_in_docstrings_run(module):
    assert doctest.testmod(module).attempted > 0
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("text", "tokens"), [("full", None), ("Block", 128), ("block:7", 7), (" block:2K ", 2048)]
)
def test_prefill_is_read(text, tokens):
    assert parse_prefill(text) == tokens


@pytest.mark.parametrize(
    ("device", "tokens"), [("cuda", 2048), ("cuda:3", 2048), ("cpu", 128), ("mps", 128), ("", 128)]
)
def test_a_block_without_a_size_has_that_of_the_device(device, tokens):
    assert parse_prefill("block", device=device) == tokens
    assert parse_prefill("block:64", device=device) == 64
    assert parse_prefill("full", device=device) is None


@pytest.mark.parametrize("text", ["blok", "full:3", "block:0", "block:-1", "block:x", "block:4k"])
def test_a_prefill_that_cannot_be_read_is_refused(text):
    with pytest.raises(UsageError):
        parse_prefill(text)
