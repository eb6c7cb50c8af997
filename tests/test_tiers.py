"""What is left out of the default run is chosen by rule, and is in the exhaustive one."""

import itertools
import subprocess
from pathlib import Path

import pytest

from tests.tiers import each_once, few, in_part, read_part

pytest_plugins = ["pytester"]


def product(**sizes):
    names = list(sizes)
    return [
        dict(zip(names, case, strict=True))
        for case in itertools.product(*(range(size) for size in sizes.values()))
    ]


def test_every_value_is_in_a_case_and_no_more_cases_are_taken_than_need_be():
    cases = product(policy=36, budget=3, mode=2, family=2)
    chosen = [cases[i] for i in each_once(cases)]
    assert len(chosen) == 36
    for axis, size in (("policy", 36), ("budget", 3), ("mode", 2), ("family", 2)):
        counts = [sum(case[axis] == value for case in chosen) for value in range(size)]
        assert max(counts) - min(counts) <= 2, axis


def test_every_two_values_meet_and_three_need_not():
    cases = product(policy=36, budget=3, mode=2, family=2)
    chosen = [cases[i] for i in each_once(cases, together=2)]
    assert len(chosen) <= 36 * 3 + 4
    for one, other in itertools.combinations(cases[0], 2):
        found = {(case[one], case[other]) for case in chosen}
        assert found == {(case[one], case[other]) for case in cases}
    assert len({(case["policy"], case["mode"], case["family"]) for case in chosen}) < 36 * 4
    pairs = product(policy=7, mode=3)
    assert each_once(pairs, together=2) == set(range(21))
    assert each_once(product(policy=5), together=2) == set(range(5))


def test_the_choice_is_the_same_every_time():
    cases = product(policy=7, mode=3)
    assert each_once(cases) == each_once(cases)
    assert each_once([{"policy": 0}]) == {0}


def test_the_tiers_together_are_all_cases(pytester):
    pytester.makeini("[pytest]\nmarkers =\n  each_once: a\n  few: c\n  exhaustive: b\n  slow: d\n")
    pytester.makeconftest(
        "import pytest\nfrom tests.tiers import mark_the_rest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items): mark_the_rest(items)\n"
    )
    pytester.makepyfile(
        "import pytest\n"
        "@pytest.mark.each_once\n"
        "@pytest.mark.parametrize('b', 'xy')\n"
        "@pytest.mark.parametrize('a', range(5))\n"
        "def test_it(a, b): pass\n"
        "@pytest.mark.few(3)\n"
        "@pytest.mark.parametrize('a', range(7))\n"
        "def test_some(a): pass\n"
        "@pytest.mark.each_once\n"
        "@pytest.mark.parametrize('c', 'xy')\n"
        "@pytest.mark.parametrize('b', 'xy')\n"
        "@pytest.mark.parametrize('a', 'xy')\n"
        "def test_three(a, b, c): pass\n"
    )

    def passed(marks):
        outcome = pytester.runpytest_inprocess("-m", marks, "-p", "no:xdist").parseoutcomes()
        return outcome["passed"]

    assert passed("not exhaustive and not slow") == 5 + 3 + 2
    paired, left = passed("exhaustive"), passed("slow")
    assert passed("not slow") == 5 + 3 + 2 + paired
    assert paired + left == 5 + 4 + 6
    assert left in (2, 3, 4)  # of eight cases, four hold every two values


def test_few_cases_are_spread_over_all():
    assert few(3, [0, 2, 4, 6, 8, 10]) == {0, 4, 8}
    assert few(3, [7]) == {7}


def test_each_case_is_in_one_part():
    names = [f"tests/test_a.py::test_it[{i}]" for i in range(600)]
    parts = [[in_part(name, *read_part(f"{i}/6")) for i in range(1, 7)] for name in names]
    assert all(sum(part) == 1 for part in parts)
    assert all(70 < sum(part[i] for part in parts) < 130 for i in range(6))


@pytest.mark.parametrize("text", ["7/6", "0/6", "x", "1/0", "-1/6", "1/6/2", "²/6"])
def test_a_part_that_there_is_not_is_refused(text):
    with pytest.raises(pytest.UsageError, match=f"--part {text} is no part; --part 2/6"):
        read_part(text)


def test_the_gate_refuses_a_word_that_it_does_not_know():
    gate = Path(__file__).parents[1] / ".ci" / "run"
    done = subprocess.run([gate, "--al"], capture_output=True, text=True)
    said = "error: .ci/run takes --all or nothing, not --al\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
