"""The F1 of single characters."""

import pytest

from kvtool.evaluation.metrics.text import character_f1


def test_worked_cases():
    for answer, reference, score in [
        ("宝玉", "宝玉", 1),
        ("《宝玉》。 ", "宝玉！", 1),
        ("黛玉", "宝玉", 0.5),  # one of two in both
        ("玉玉", "宝玉", 0.5),  # counted as often as it occurs
        ("他叫宝玉", "宝玉", 2 * 0.5 / 1.5),  # precision 1/2, recall 1
        ("卡尔马克思", "卡尔·马克思", 1),
        ("ABC", "abc", 1),
        ("", "宝玉", 0),
        ("。", "宝玉", 0),
        ("贾母", "宝玉", 0),
    ]:
        assert character_f1(answer, reference) == pytest.approx(score)
