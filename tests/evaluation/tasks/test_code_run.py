"""Functions that call each other."""

import numpy as np

from kvtool.evaluation.tasks.infinitebench import Function, call_chain, unrelated_functions


def test_functions_are_python():
    for function, text in [
        (Function(3, None, 5), "def func_3(x):\n    return x + 5\n"),
        (Function(3, 8, -2), "def func_3(x):\n    return func_8(x) - 2\n"),
    ]:
        assert str(function) == text


def test_a_chain_calls_through_in_order():
    chain = call_chain(np.random.default_rng(0), [4, 9, 2])
    assert [(function.name, function.calls) for function in chain] == [(4, 9), (9, 2), (2, None)]


def test_calls_go_to_earlier_functions_and_no_deeper_than_allowed():
    for deepest in [1, 3, 10]:
        names = list(range(100, 2100))
        depth: dict = {None: 0}
        for function in unrelated_functions(np.random.default_rng(0), names, deepest):
            assert function.name not in depth
            depth[function.name] = depth[function.calls] + 1  # an earlier one, or none
            assert 1 <= abs(function.added) <= 9
        assert max(depth.values()) == deepest
        assert len(depth) == 2001
