"""Mistakes in documents: where each one stands, and all of them told at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtool.errors import UsageError

Keys = tuple[str | int, ...]
"""The way to a value: keys of mappings and indices of lists, from the top."""

_BREAK = re.compile(r"\r\n|\n|\r")
_BEFORE, _AFTER = 70, 40  # characters of a line that are shown around a place


@dataclass(frozen=True)
class Mark:
    """A place in a text, or a command-line flag as typed if `index` is None.

    Attributes:
        name: the file as typed, `<stdin>`, or the flag.
        text: the whole text.
        index: characters before the place.
    """

    name: str
    text: str = field(default="", repr=False)
    index: int | None = None

    @property
    def line(self) -> int:
        """The line, from 1."""
        return sum(1 for _ in _BREAK.finditer(self.text, 0, self.index)) + 1

    @property
    def column(self) -> int:
        """The column in characters, from 1."""
        return self.index - self._line_start + 1

    @property
    def _line_start(self) -> int:
        return 1 + max(self.text.rfind(end, 0, self.index) for end in "\r\n")

    @property
    def excerpt(self) -> str:
        """The line with a caret under the place; empty for a flag."""
        if self.index is None:
            return ""
        end = _BREAK.search(self.text, self.index)
        before = self.text[self._line_start : self.index][-_BEFORE:].lstrip()
        after = self.text[self.index : end.start() if end else None][:_AFTER]
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
        return ".".join(map(str, self.keys))

    @property
    def excerpt(self) -> str:
        """The line with a caret under the place; empty for a flag."""
        return self.mark.excerpt

    def __str__(self) -> str:
        """Return place, path and message; a flag other than --set and --unset is its own path."""
        by_key = not self.place.startswith("--") or self.place.startswith(("--set ", "--unset "))
        path = self.path if by_key else ""
        return ": ".join(part for part in (self.place, path, self.message) if part)


class DocumentError(UsageError):
    """Mistakes in a document; as a string it is the first one, in one line."""

    def __init__(self, problems: Sequence[Problem], *, hint: str | None = None) -> None:
        self.problems = list(problems)
        more = len(self.problems) - 1
        super().__init__(f"{self.problems[0]}" + (f" (and {more} more)" if more else ""), hint=hint)

    def report(self) -> str:
        """Return every mistake on a line of its own, its line of the document below it."""
        return "\n".join(
            "\n".join(filter(None, (str(problem), problem.excerpt))) for problem in self.problems
        )
