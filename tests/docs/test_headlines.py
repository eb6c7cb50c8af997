"""The first line about a module begins with a verb or with the thing that the module holds."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "kvtool"
FILES = sorted(ROOT.rglob("*.py"))
VAGUE = {
    *("what", "how", "where", "which", "when", "whether", "who", "whose", "why", "from", "one"),
    *("it", "its", "this", "these", "that", "they", "something", "thing", "things", "stuff"),
    *("everything", "all", "some", "various", "helpers", "utilities", "utils", "misc"),
}


def first_word(headline: str) -> str:
    """The first word below an article."""
    words = headline.lower().split()
    if words[0] in ("a", "an", "the") and words[1:]:
        words = words[1:]
    return words[0].strip(".,:;")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_headline_names_the_thing(file):
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    assert text, "a module says in a line what it holds"
    assert first_word(text.splitlines()[0]) not in VAGUE, text.splitlines()[0]


@pytest.mark.parametrize("headline", ["What a cache holds.", "The things of a run.", "One step."])
def test_a_vague_headline_is_found(headline):
    assert first_word(headline) in VAGUE
