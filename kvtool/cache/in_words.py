"""What a cache says of itself when it is printed."""

from __future__ import annotations

from html import escape
from typing import Any

from kvtool.documents.generation import CacheSection


class InWords:
    """A cache that says what it holds, as the commands do."""

    def __str__(self: Any) -> str:
        return CacheSection.of(self.report()).in_words()

    def __repr__(self: Any) -> str:
        budget = "" if self.budget is None else f", budget {self.budget}"
        return f"<{type(self).__name__} {self.policy}{budget}: {self}>"

    def _repr_html_(self: Any) -> str:
        return f"<p><code>{escape(str(self.policy))}</code>: {escape(str(self))}</p>"
