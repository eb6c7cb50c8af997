"""Values and mistakes of a document, each with its place."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from kvtool.errors import UsageError, clip

Keys = tuple[str | int, ...]
"""The way to a value: keys of mappings and indices of lists, from the top."""

_BREAK = re.compile(r"\r\n|\n|\r")
_BEFORE, _AFTER = 70, 40  # characters of a line that are shown around a place
_REPORTED = 20  # mistakes of a document, at most
_FLAG = 200  # characters of a flag and its value
_KEY = 60  # characters of a key in the way to a value


@lru_cache(maxsize=4)
def _line_starts(text: str) -> list[int]:
    """Return where lines begin, counted once for all the mistakes of a text."""
    return [0, *(found.end() for found in _BREAK.finditer(text))]


class Hidden(str):
    """A text whose lines are not shown in errors."""


@dataclass(frozen=True)
class Mark:
    """A place in a text, or a command-line flag as typed if there is none.

    Attributes:
        name: the file as typed, `<stdin>`, or the flag.
        text: the whole text.
        at: characters before the place, or what finds it out; None of a flag.
    """

    name: str
    text: str = field(default="", repr=False)
    at: int | Callable[[], int] | None = None

    @property
    def index(self) -> int | None:
        """Characters before the place, None of a flag."""
        return self.at() if callable(self.at) else self.at

    @property
    def in_text(self) -> bool:
        """Whether it is a place in a text, and not a flag."""
        return self.at is not None

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
        if index is None or isinstance(self.text, Hidden):
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
        mark: its place.
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

    def __str__(self) -> str:
        """Return place, path and message; a flag other than --set and --unset is its own path."""
        by_key = not self.place.startswith("--") or self.place.startswith(("--set ", "--unset "))
        path = self.path if by_key else ""
        place = self.place if self.mark.index is not None else self.place[:_FLAG]
        text = ": ".join(part for part in (place, path, clip(self.message)) if part)
        return " ".join(text.split())  # keys may hold line ends


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
            for problem in self.problems[:_REPORTED]
            for line in (str(problem), problem.mark.excerpt)
            if line
        ]
        more = len(self.problems) - _REPORTED
        return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)


DEEPEST = 64
"""Levels of mappings and lists that a document may have."""


@dataclass(frozen=True)
class Node:
    """A value and its place.

    Attributes:
        value: a scalar, a dictionary of nodes or a list of nodes.
        mark: where the value begins.
        key: where its key begins, None for list items and the top.
    """

    value: Any
    mark: Mark
    key: Mark | None = None

    @classmethod
    def of(cls, data: Any, mark: Mark) -> Node:
        """Make a tree of plain data, all of it at `mark`."""
        if isinstance(data, dict):
            return cls({key: replace(cls.of(data[key], mark), key=mark) for key in data}, mark)
        if isinstance(data, (list, tuple)):
            return cls([cls.of(item, mark) for item in data], mark)
        return cls(data, mark)

    @property
    def data(self) -> Any:
        """Plain dictionaries, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.data for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.data for node in self.value]
        return self.value

    @property
    def depth(self) -> int:
        """Levels of mappings and lists below this value, 0 of a scalar."""
        if isinstance(self.value, dict):
            inside = list(self.value.values())
        else:
            inside = self.value if isinstance(self.value, list) else []
        below = max((node.depth for node in inside), default=0)
        return below + isinstance(self.value, (dict, list))

    def child(self, key: str | int) -> Node | None:
        """Return the value under a key or an index, None if there is none."""
        if isinstance(self.value, dict):
            return self.value.get(key)
        if isinstance(self.value, list) and isinstance(key, int) and 0 <= key < len(self.value):
            return self.value[key]
        return None

    def with_child(self, key: str | int, node: Node) -> Node:
        """Return a copy that has `node` under a key, or at an index (the end included)."""
        if isinstance(self.value, dict):
            return replace(self, value={**self.value, key: node})
        at = int(key)
        return replace(self, value=[*self.value[:at], node, *self.value[at + 1 :]])

    def without_child(self, key: str | int) -> Node:
        """Return a copy without the value under a key or an index."""
        if isinstance(self.value, dict):
            return replace(self, value={k: node for k, node in self.value.items() if k != key})
        at = int(key)
        return replace(self, value=[*self.value[:at], *self.value[at + 1 :]])
