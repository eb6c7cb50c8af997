"""Scores of answers that are code or a choice: lines of code, functions, one of four options.

Lines of code are compared as LongBench does. LongBench uses `fuzzywuzzy`, which means `difflib`
unless python-Levenshtein happens to be installed. Here it always means `difflib`, so that the score
depends on the texts only.

Choices follow InfiniteBench (https://github.com/OpenBMB/InfiniteBench), SCBench
(https://github.com/microsoft/MInference) and LongBench v2 (https://github.com/THUDM/LongBench). The
rules of the first two are lenient in odd ways, kept so that scores compare. The first letter of an
answer counts even if it only begins a word ("Dickens says B" means D). After "answer is" one
character is skipped, whatever it is.

Functions are scored as RepoQA does inside SCBench: which of several functions does an answer repeat
(Liu et al., 2024, https://arxiv.org/abs/2406.06025; https://github.com/microsoft/MInference, folder
scbench)? Differences: the function is the first code block of the answer, unchanged; upstream looks
in it for the first function with a parser. BLEU is sacrebleu's without smoothing instead of NLTK's
with Chen and Cherry's fourth. From the threshold up the two agree, but NLTK's never reaches it for
a function of fewer than four words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

from kvtool.evaluation.metrics.text import bleu_of

_NO_CODE = ("`", "#", "//")


def code_line(prediction: str) -> str:
    """Return the first line without a backtick, `#` or `//`; empty if every line has one.

    >>> code_line("\\n# add\\nreturn a + b\\n")
    'return a + b'
    """
    lines = prediction.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in _NO_CODE)), "")


def code_sim(prediction: str, reference: str) -> float:
    """Return the similarity of the first line of code, in whole percent, from 0 to 1.

    >>> code_sim("return a + b", "return a + c")
    0.92
    """
    line = code_line(prediction)
    if not line or not reference:
        return float(line == reference)
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100


LETTERS = "ABCD"
_BOOK_CUES = ("answer is:", "answer:", "answer is", "option is")
_CODE_CUES = ("answer is:", "is:", "answer:")
_AROUND_BOOK = re.compile(r"[\n\"'.,?!{}]")
_AROUND_CODE = re.compile(r"[\n`'\"*-]|[Oo]ption")
_IN_BRACKETS = re.compile(r"The correct answer is \(([A-D])\)")
_STATED = re.compile(r"The correct answer is ([A-D])")
_BARE_LETTER = re.compile(r"([A-D])(?:[.:)\n]|$)")


def list_options(options: Sequence[str]) -> str:
    """Return the options line by line, with their letters.

    >>> list_options(["red", "blue"])
    'A. red\\nB. blue'
    """
    return "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=False))


def right_letter(answers: Sequence[str], options: Sequence[str]) -> str | None:
    """Return the letter of the right option, None if it cannot be found.

    Args:
        answers: the right option's text, its letter, or both in this order.
    """
    if len(answers) > 1 and answers[1] in tuple(LETTERS):
        return answers[1]
    if answers[0] in options:
        return LETTERS[list(options).index(answers[0])]
    return answers[0] if answers[0] in tuple(LETTERS) else None


def names_option(prediction: str, letter: str, text: str) -> bool:
    """Return whether an answer about a book names the option, by its letter or its text."""
    said = prediction.strip()
    if not said:
        return False
    if said[0] in LETTERS:
        return said[0] == letter
    if said == text:
        return True
    said = _spaced(said, _AROUND_BOOK)
    after = _after_cue(said, _BOOK_CUES)
    if after is not None:
        return after.startswith((letter, text))
    named = next((word for word in said.split() if word in LETTERS), None)
    return named == letter


def names_function(prediction: str, letter: str, function: str) -> bool:
    """Return whether an answer about code names the function, by its letter or its name.

    An answer must begin with the letter or say it after a cue ("the answer is: B"). The authors'
    script takes the beginning only with a dot or colon after the letter. Here the letter may also
    be alone or before a bracket, since a right answer often ends there.
    """
    said = prediction.strip()
    bare = _BARE_LETTER.match(said)
    if bare and bare[1] == letter:
        return True
    after = _after_cue(_spaced(said, _AROUND_CODE), _CODE_CUES)
    return after is not None and after.startswith((letter, function))


def stated_letter(prediction: str) -> str | None:
    """Return the letter that an answer states as LongBench v2 wants it, None if it states none.

    >>> stated_letter("**The correct answer is (B)**"), stated_letter("(B)")
    ('B', None)
    """
    text = prediction.replace("*", "")
    found = _IN_BRACKETS.search(text) or _STATED.search(text)
    return found[1] if found else None


def _spaced(text: str, unwanted: re.Pattern[str]) -> str:
    return re.sub(" {2,}", " ", unwanted.sub(" ", text))


def _after_cue(text: str, cues: Sequence[str]) -> str | None:
    """Return what follows the first cue found, in the order of `cues`, one character later."""
    for cue in cues:
        _, found, after = text.partition(cue)
        if found:
            return after[1:]
    return None


THRESHOLD = 0.8
_CODE_BLOCK = re.compile(r"^```\w*[^\S\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def repeats_function(prediction: str, function: str, others: Sequence[str]) -> bool:
    """Return whether an answer is more like `function` than the others, and at least 0.8 BLEU.

    Args:
        others: further functions that were asked for in the same code; `function` may be among
            them.
    """
    said = first_code_block(prediction)
    similar = similarity(said, function)
    if similar < THRESHOLD:
        return False
    return all(similarity(said, other) < similar for other in others if other != function)


def first_code_block(text: str) -> str:
    """Return the text between the first two lines of three backticks, else the whole text.

    >>> first_code_block("Here it is:\\n```python\\ndef f(): ...\\n```\\nDone.")
    'def f(): ...\\n'
    """
    found = _CODE_BLOCK.search(text.strip())
    return found[1] if found else text.strip()


def similarity(candidate: str, reference: str) -> float:
    """Return the sentence BLEU, from 0 to 1, of words between white space.

    Raises:
        UsageError: sacrebleu is not installed.
    """
    said, wanted = " ".join(candidate.split()), " ".join(reference.split())
    bleu = bleu_of(tokenize="none", smooth_method="none", effective_order=True)
    return bleu.sentence_score(said, [wanted]).score / 100
