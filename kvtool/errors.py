"""The mistakes a caller can put right, and the exit code each one ends the command with.

Texts of errors are printed with control characters spelled out, so that no terminal obeys them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_QUOTED = 200  # characters of what was given that a message repeats
_LONGEST = 1200  # characters of a message


class KvtoolError(ValueError):
    """A failure that takes one line: what is wrong with the value given, what would work.

    >>> str(KvtoolError("no model", hint="--model DIR"))
    'no model; --model DIR'

    Args:
        message: one line, lower case, no full stop.
        hint: what to do about it, which a terminal shows as a second line ``hint: ...``.
        exit_code: with which the command ends, in place of the one of the class.
    """

    exit_code = 1

    def __init__(
        self, message: str, *, hint: str | None = None, exit_code: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = clip(message)
        self.hint = None if hint is None else clip(hint)
        if exit_code is not None:
            self.exit_code = exit_code

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}; {self.hint}"

    def report(self) -> str:
        """Return what a terminal shows: here one line."""
        return " ".join(self.message.split()).rstrip(".")


class KvtoolWarning(UserWarning):
    """What a caller should know of a call that goes on; a command prints it, also with `-q`."""


class UsageError(KvtoolError):
    """A wrong argument, option, policy, budget or file name: refused before any work is done."""

    exit_code = 2


class PolicyError(KvtoolError):
    """A policy from outside the package that breaks its contract, with the place in its file."""


def in_one_line(error: BaseException) -> str:
    r"""Return the class of an error and the first line that it says.

    >>> in_one_line(ValueError("no number\nsecond line"))
    'ValueError: no number'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory has run out, on a GPU or on the host.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)  # of torch


def quote(text: object) -> str:
    """Return what was given in backquotes, at most 200 characters of it.

    >>> quote("4k"), len(quote("x" * 5000))
    ('`4k`', 205)
    """
    text = str(text)
    return f"`{text}`" if len(text) <= _QUOTED else f"`{text[:_QUOTED]}...`"


def _shorter(quoted: re.Match[str]) -> str:
    """Shorten one quotation, but not a second time."""
    return quote(quoted[1]) if len(quoted[1]) > _QUOTED + len("...") else quoted[0]


def clip(message: str) -> str:
    """Return a message whose quotations, and which as a whole, are not long; and can be printed."""
    message = re.sub(r"`([^`]*)`", _shorter, message)  # in pairs, so that text between them stays
    if len(message) > _LONGEST:
        message = f"{message[: _LONGEST - _QUOTED]} ... {message[-_QUOTED:]}"
    return printable(message)


def printable(text: str) -> str:
    r"""Return a text with bytes spelled out that are not UTF-8, which names of files may hold.

    Python reads such a byte as half of a surrogate pair, which no file and no terminal takes.

    >>> printable("caf\udce9"), printable("café")
    ('caf\\udce9', 'café')
    """
    return text.encode("utf-8", "backslashreplace").decode()


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that `word` was most likely meant to be, or None.

    >>> nearest("snapvk", ["h2o", "snapkv", "streaming"])
    'snapkv'
    >>> nearest("zebra", ["h2o", "snapkv"]) is None
    True
    """
    if len(word) > _QUOTED:
        return None  # no name is that long, and to compare would take long
    spelling = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.lower(), spelling, n=1, cutoff=0.5)
    return spelling[found[0]] if found else None


def did_you_mean(word: str, choices: Iterable[str]) -> str | None:
    """Return the hint ``did you mean `x`?`` for the nearest choice, or None if none is near.

    >>> did_you_mean("recnt", ["recent", "sinks"])
    'did you mean `recent`?'
    """
    found = nearest(word, choices)
    return f"did you mean `{found}`?" if found else None


_CONTROL = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}


def visible(text: str) -> str:
    r"""Spell out the control characters of a text: a terminal would obey them.

    >>> visible("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return text.translate(_CONTROL)
