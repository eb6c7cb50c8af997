"""The first line about a module begins with a verb or with the thing that the module holds."""

from __future__ import annotations

import ast
import tokenize
from pathlib import Path

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


def headline(file: Path) -> str:
    """The first line of the text that a module begins with; empty where there is none."""
    with file.open(encoding="utf-8") as source:
        for token in tokenize.generate_tokens(source.readline):
            if token.type not in (tokenize.COMMENT, tokenize.NL):
                string = ast.literal_eval(token.string) if token.type == tokenize.STRING else ""
                return string.partition("\n")[0]
    return ""


def test_the_headline_of_every_module_names_the_thing():
    lines = {}
    for file in FILES:
        lines[str(file.relative_to(ROOT))] = headline(file) or "what?"
    assert len(lines) > 400
    assert {at: line for at, line in lines.items() if first_word(line) in VAGUE} == {}
