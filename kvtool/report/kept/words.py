"""What shades and marks of a kept text are called."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtool.cache.kept import KeptTokens

MARKS = {"merged": "merged into tokens that stay", "offloaded": "moved to host memory"}
"""Of evicted tokens, which are underlined."""


def doing(kept: KeptTokens) -> str:
    """Return what layers and heads do with a token that is shaded."""
    return f"read it in the last {kept.reads} steps" if kept.mark == "read" else "keep it"
