"""Mistakes in documents: where each one stands, and all of them told at once."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from kvtool.errors import UsageError, clip

Keys = tuple[str | int, ...]
"""The way to a value: keys of mappings and indices of lists, from the top."""

_BREAK = re.compile(r"\r\n|\n|\r")
_BEFORE, _AFTER = 70, 40  # characters of a line that are shown around a place
_TOLD = 20  # mistakes of a document
_FLAG = 200  # characters of a flag and its value
_KEY = 60  # characters of a key in the way to a value


@lru_cache(maxsize=4)
def _line_starts(text: str) -> list[int]:
    """Return where lines begin, counted once for all the mistakes of a text."""
    return [0, *(found.end() for found in _BREAK.finditer(text))]


@dataclass(frozen=True)
class Mark:
    """A place in a text, or a command-line flag as typed if there is none.

    Attributes:
        name: the file as typed, `<stdin>`, or the flag.
        text: the whole text.
        at: characters before the place, or what finds it out; None of a flag.
        shown: whether the line of the text may be shown.
    """

    name: str
    text: str = field(default="", repr=False)
    at: int | Callable[[], int] | None = None
    shown: bool = True

    @property
    def index(self) -> int | None:
        """Characters before the place, None of a flag."""
        return self.at() if callable(self.at) else self.at

    @property
    def line(self) -> int:
        """The line, from 1."""
        return bisect_right(_line_starts(self.text), self.index or 0)

    @property
    def column(self) -> int:
        """The column in characters, from 1."""
        return (self.index or 0) - self._line_start + 1

    @property
    def _line_start(self) -> int:
        return _line_starts(self.text)[self.line - 1]

    @property
    def excerpt(self) -> str:
        """The line with a caret under the place; empty for a flag, and where it is not shown."""
        index = self.index
        if index is None or not self.shown:
            return ""
        start = max(self._line_start, index - _BEFORE)
        before = self.text[start:index].lstrip()
        after = _BREAK.split(self.text[index : index + _AFTER], maxsplit=1)[0]
        shown = "".join(c if c.isprintable() else " " for c in before + after)
        return f"    {shown.rstrip()}\n    {' ' * len(before)}^"

    def __str__(self) -> str:
        return self.name if self.index is None else f"{self.name}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Problem:
    """One mistake.

    Attributes:
        mark: where it stands.
        keys: the way to the value or key.
        message: what is wrong, and what would work.
    """

    mark: Mark
    keys: Keys
    message: str

    @property
    def place(self) -> str:
        """`FILE:LINE:COLUMN`, or the flag."""
        return str(self.mark)

    @property
    def path(self) -> str:
        """The way to the value, such as `eval.tasks.0.samples`."""
        keys = (str(key) for key in self.keys)
        return ".".join(key if len(key) <= _KEY else f"{key[:_KEY]}..." for key in keys)

    @property
    def excerpt(self) -> str:
        """The line with a caret under the place; empty for a flag."""
        return self.mark.excerpt

    def __str__(self) -> str:
        """Return place, path and message; a flag other than --set and --unset is its own path."""
        by_key = not self.place.startswith("--") or self.place.startswith(("--set ", "--unset "))
        path = self.path if by_key else ""
        place = self.place if self.mark.index is not None else self.place[:_FLAG]
        told = ": ".join(part for part in (place, path, clip(self.message)) if part)
        return " ".join(told.split())  # keys may hold line ends

    def without_line(self) -> Problem:
        """Return the problem without the line that it stands in."""
        return replace(self, mark=replace(self.mark, shown=False))


class DocumentError(UsageError):
    """Mistakes in a document; as a string it is the first one, in one line."""

    def __init__(self, problems: Sequence[Problem], *, hint: str | None = None) -> None:
        self.problems = list(problems)
        more = len(self.problems) - 1
        super().__init__(f"{self.problems[0]}" + (f" (and {more} more)" if more else ""), hint=hint)

    def report(self) -> str:
        """Return up to 20 mistakes on lines of their own, their lines of the document below."""
        lines = [
            line
            for problem in self.problems[:_TOLD]
            for line in (str(problem), problem.excerpt)
            if line
        ]
        more = len(self.problems) - _TOLD
        return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)
