"""Lines of code that are nearly right."""

import random
from difflib import SequenceMatcher

from kvtool.evaluation.metrics.code import code_line, code_sim


def test_the_first_line_without_comment_is_taken():
    for answer, line in [
        ("    x = 1\ny = 2", "    x = 1"),
        ("\n\nx = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1"),
        ("# why\n// why\nx = 1", "x = 1"),
        ("x = 1  # why\ny = 2", "y = 2"),  # a comment anywhere rules a line out
        ("# why\n\nx = 1", ""),  # an empty line is a line
        ("# only\n`this`", ""),
        ("", ""),
    ]:
        assert code_line(answer) == line


def test_worked_lines():
    for prediction, reference, expected in [
        ("abcd", "abcd", 1.0),
        ("abcd", "wxyz", 0.0),
        ("abcd\nmore", "abcd", 1.0),
        ("ab", "abc", 0.8),  # 2 * 2 / 5
        ("abc", "axxxc", 0.5),  # 2 * 2 / 8
        ("ab", "abbbbbbbbb", 0.33),  # 4 / 12, to whole percent
        ("", "abc", 0.0),
        ("abc", "", 0.0),
        ("# no", "", 1.0),
    ]:
        assert code_sim(prediction, reference) == expected


def test_random_lines_equal_matching_blocks_summed():
    rng = random.Random(0)
    for _ in range(300):
        line, reference = ("".join(rng.choices("ab=( ", k=rng.randrange(1, 20))) for _ in range(2))
        blocks = SequenceMatcher(None, line, reference).get_matching_blocks()
        ratio = 2 * sum(block.size for block in blocks) / (len(line) + len(reference))
        assert code_sim(line, reference) == round(100 * ratio) / 100
