"""Docstrings, comments and pages use one word for one thing, and none of a private English."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvtool"
WORDS = {  # what is refused, and what to write in its place
    r"told|tell|tells|telling": "show, report, ask, distinguish, identify: name what is done",
    r"nobody|somebody": "the user, a caller, no caller; unknown, by default, not asked for",
    r"so many|just so": "the number by its name: `most`, n",
    r"mend|mends|mended|mending": "fix",
    r"held against|holds? \w+ (?:\w+ )?against": "compared with",
    r"arms?": "variant",
    r"lend|lends|lent|lending|borrow|borrows|borrowed|borrowing": "share",
    r"foretells?|foretold": "estimate",
    r"(?:bring|brings|brought) (?:\w+ )?back": "dequantise",
    r"settles?|settled|settling": "resolve",
    r"due(?! to\b)": "the step of the next cut",
    r"leaving(?![^.;:]* out\b)": "offloaded, evicted",
    r"turned(?! (?:in)?to\b)|turns? (?:keys|queries|copies|vectors)": "rotate; a turn is of a chat",
    r"(?:de|en)cod(?:e|es|ed|ing) (?:a |the )?(?:codes|slots|codec)": "quantise, dequantise",
    r"rows? of (?:a|the) (?:padded )?batch|(?:batch|padded) rows?": "batch entry, sequence",
    r"what (?:is|was) kept|what leaves": "kept tokens, evicted tokens",
    r"goes by|go by|going by|lies? over|lay over": "uses, overrides",
    r"stands?(?! for\b)|stood|standing in": "is, is in, replaces",
    r"rooms?": "subpackage; slots, bytes, memory",
}
REFUSED = re.compile(
    rf"\b(?:{'|'.join(words.replace(' ', chr(92) + 's+') for words in WORDS)})\b", re.IGNORECASE
)
TWIN = re.compile(r"\btwins?\b", re.IGNORECASE)  # of tests only, whose page explains it
QUOTED = re.compile(  # code, strings, links, terms that are defined, columns of a table, doctests
    r"`[^`]*`|\"[^\"\n]*\"|<[^>\n]*>|\*\w+\*"
    r"|^ *(?:>>>|\.\.\.) .*\n(?:(?! *>>>) *\S.*\n)*",
    re.MULTILINE,
)
CODE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)


def refused(text: str) -> list[str]:
    """Return the words of a text that have a better one."""
    return [" ".join(each.split()) for each in REFUSED.findall(QUOTED.sub(" ", text))]


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a module, each with its first line."""
    for node in ast.walk(ast.parse(source)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, inspect.cleandoc(value.value) + "\n"
    first, last, comment = 0, -1, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("#: ")
            if line != last + 1:
                yield first, comment
                first, comment = line, ""
            last, comment = line, f"{comment} {text}"
    yield first, comment


def page_prose(path: Path) -> str:
    """Return a page without its code; of the changelog what is not released yet."""
    text = path.read_text(encoding="utf-8")
    if path.name == "CHANGELOG.md":
        text = text.split("\n## ")[1]
    return CODE.sub("", text)


def pages() -> list[Path]:
    found = [
        page for part in ("kvtool", "recipes", "tests") for page in (ROOT / part).rglob("*.md")
    ]
    return [*sorted(ROOT.glob("*.md")), *sorted(found)]


def test_docstrings_and_comments_use_the_words():
    wrong = []
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]):
        source = path.read_text(encoding="utf-8")
        if not (REFUSED.search(source) or TWIN.search(source)):
            continue
        for line, text in prose(source):
            words = refused(text) + TWIN.findall(text)
            wrong += [f"{path.relative_to(ROOT)}:{line}: {word}" for word in words]
    assert wrong == []


def test_pages_use_the_words():
    wrong = []
    for page in pages():
        text, place = page_prose(page), page.relative_to(ROOT)
        twins = [] if "tests" in place.parts else TWIN.findall(QUOTED.sub(" ", text))
        wrong += [f"{place}: {word}" for word in refused(text) + twins]
    assert wrong == []
