"""A layer that attends to the chunk of the text that its token is in; it keeps just that."""

from __future__ import annotations

from kvtool.cache.storage.layer import SlotLayer


class ChunkedSlotLayer(SlotLayer):
    """A slot layer whose window is a chunk: chunks of that many tokens stand side by side."""

    chunked = True
