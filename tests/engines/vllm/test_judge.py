"""The run of the real engine fails where an answer is not that of transformers."""

from __future__ import annotations

from copy import deepcopy

import pytest

from tests.engines.vllm.judge import wrong

RIGHT = {"right": 12, "of": 12, "worst_logprob": 4e-5}
FOUND = {
    "mixed": {**RIGHT, "again": dict(RIGHT), "text_unharmed": True},
    "vanish": {
        "reasons": ["error", "error"],
        "tokens_of_refused": [0, 0],
        "neighbour_right": [1, 1],
        "back": {"right": 2, "of": 2, "worst_logprob": 0.0},
    },
    "refused": {"unknown name": "error", "no question": "error"},
    "preempted": {"preemptions": 18, "same": 24, **RIGHT, "right": 24, "of": 24},
    "http": {"right": 6, "of": 6, "unknown_name": "500: no cache", "chat_as_completion": True},
    "cost": {
        "ids, 1, cold": {"peak_blocks": 11, "cpu_s": 2.5},
        "full, 1, cold": {"peak_blocks": 129, "cpu_s": 17.1},
    },
}


def test_right_results_have_nothing_wrong():
    assert list(wrong(FOUND)) == []


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("mixed", "right"), 11, "mixed: 11 of 12"),
        (("mixed", "again", "right"), 11, "mixed again: 11 of 12"),
        (("mixed", "again", "worst_logprob"), 2e-4, "mixed again: log-probabilities"),
        (("mixed", "text_unharmed"), False, "text_unharmed is false"),
        (("vanish", "reasons"), ["error", "length"], "a file that is gone ended"),
        (("vanish", "tokens_of_refused"), [0, 1], "changed answers"),
        (("vanish", "neighbour_right"), [1, 0], "changed answers"),
        (("vanish", "back", "right"), 1, "vanish back: 1 of 2"),
        (("refused", "no question"), "length", "no question ended with length"),
        (("preempted", "same"), 23, "23 of 24 are same"),
        (("preempted", "preemptions"), 0, "nothing was preempted"),
        (("http", "unknown_name"), "200: length", "unknown_name has status 200"),
        (("http", "chat_as_completion"), False, "chat_as_completion is false"),
        (("cost", "ids, 1, cold", "cpu_s"), 4.0, "cpu_s is 4.0"),
        (("cost", "ids, 1, cold", "peak_blocks"), 26, "peak_blocks is 26"),
    ],
)
def test_each_wrong_result_is_found(place, value, words):
    found = deepcopy(FOUND)
    part = found
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    (said,) = wrong(found)
    assert words in said
