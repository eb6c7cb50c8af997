"""The sentences of the pages are short: at most 20 words on average, none above 40.

Code blocks, tables, headlines, HTML and lines that are only links do not count. A span of code is
one word, a link is the words that it shows, and each item of a list begins a sentence.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(
        page for name in ("README", "reference") for page in (ROOT / "kvtool").rglob(f"{name}.md")
    ),
]
MOST, MEAN = 40, 20
CODE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
LEFT_OUT = re.compile(r"^ *(?:\||#|</?[a-z]|<!--).*$", re.MULTILINE)  # tables, headlines, HTML
ITEM = re.compile(r"^ *(?:[-*]|\d+\.) +", re.MULTILINE)
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)")
SPAN = re.compile(r"`[^`]*`")
END = re.compile(r"(?<=[.!?])(?<!\.\.)(?:\*\*|\)|\")* +")
WORD = re.compile(r"\w[\w'’/.,%*+-]*")


def sentences(text: str) -> list[str]:
    """Return the sentences of a page, with `CODE` in place of each span of code."""
    text = LEFT_OUT.sub("\n", CODE.sub("\n\n", text))
    text = ITEM.sub("\n\n", SPAN.sub("CODE", text))
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        if WORD.search(LINK.sub(" ", paragraph)):
            found += END.split(" ".join(LINK.sub(r"\1", paragraph).split()))
    return [sentence for sentence in found if WORD.search(sentence)]


def words(sentence: str) -> int:
    """Return the number of words of a sentence."""
    return len(WORD.findall(sentence))


def test_the_sentences_of_every_page_are_short():
    long, means = [], {}
    for page in PAGES:
        name, found = str(page.relative_to(ROOT)), sentences(page.read_text(encoding="utf-8"))
        long += [(name, sentence) for sentence in found if words(sentence) > MOST]
        means[name] = sum(map(words, found)) / len(found)
    assert long == []
    assert {name: mean for name, mean in means.items() if mean > MEAN} == {}
