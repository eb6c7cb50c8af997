"""What a cache says of itself when it is printed."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from kvtool.documents.document import view
from kvtool.documents.generation import CacheSection

if TYPE_CHECKING:
    from torch import Tensor


class InWords:
    """A cache that says what it holds, as the commands do."""

    def __str__(self: Any) -> str:
        return CacheSection.of(self.report()).in_words()

    def __repr__(self: Any) -> str:
        budget = "" if self.budget is None else f", budget {self.budget}"
        return f"<{type(self).__name__} {self.policy}{budget}: {self}>"

    def _repr_html_(self: Any) -> str:
        return f"<p><code>{escape(str(self.policy))}</code>: {escape(str(self))}</p>"

    def show(self, tokenizer: Any = None, *, input_ids: Tensor | None = None, row: int = 0) -> Any:
        """Show the text token by token, each with the share of layers and heads that hold it.

        Scores, merged tokens and those that a reader has read are told of where `record` was called
        before the text was read.

        Args:
            tokenizer: None takes that of the folder or hub ID that the model came from.
            input_ids: (batch, n) the text, padding on its left; None takes what the cache knows,
                unless plain forwards fed it: only their caller knows where padding was.
            row: the batch entry.

        Returns:
            A `kvtool.report.kept.text.KeptText`: `print` it, `save("kept.html")` it, or let a
            notebook show it.

        Raises:
            UsageError: nothing has been read, or nobody knows the text.
            KvtoolError: the tokenizer cannot be loaded.
        """
        return view().kept_text(self, tokenizer, input_ids=input_ids, row=row)
