"""Documents and caches that show themselves: as text, as a data frame, as pages.

What they look like is decided further up, and told here by `kvtool` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

WIDTH = 100
"""Letters of a line, where nobody says how many."""

_FINDERS: list[Callable[[], Any]] = []


def show_with(find: Callable[[], Any]) -> None:
    """Say what shows documents.

    Args:
        find: returns what has `text(document, width)`, `frame(document)`, `html(document)` and
            `kept_text(cache, ..)`; called when something is shown.
    """
    _FINDERS[:] = [find]


def what_shows() -> Any:
    """Return what `show_with` was told of."""
    return _FINDERS[0]()


class Shown:
    """A document that can be shown."""

    def table(self, width: int = WIDTH) -> str:
        """Return what a terminal shows of it, ending in a newline.

        Args:
            width: letters of a line.
        """
        return what_shows().text(self, width)

    def to_pandas(self) -> Any:
        """Return its numbers as a pandas data frame.

        Raises:
            UsageError: pandas is not installed.
        """
        return what_shows().frame(self)

    def _repr_html_(self) -> str:
        """Return what a notebook shows of it."""
        return what_shows().html(self)
