"""The example scripts print what they say that they print."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.models.bundled import shipped

EXAMPLES = Path(__file__).parents[2] / "recipes" / "examples"


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_prints_what_it_says(script, tmp_path):
    promised = re.search(r"\nprints\n\n(.*?)\n\"\"\"", script.read_text(), re.DOTALL)[1]
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip("\n") == textwrap.dedent(promised).strip("\n")


@pytest.mark.exhaustive
def test_policies_are_compared_on_a_text_of_the_readers(tmp_path):
    text = "The green lamp was near the school. Olga returned a robin at the museum. " * 90
    (tmp_path / "mine.txt").write_text(text)
    script = EXAMPLES / "compare_policies.py"
    done = subprocess.run(
        [sys.executable, str(script), "mine.txt", str(shipped())],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^full +1.00 +100%$", done.stdout, re.MULTILINE)


def test_there_are_two_examples():
    assert {path.stem for path in EXAMPLES.glob("*.py")} >= {"compress_a_book", "compare_policies"}
