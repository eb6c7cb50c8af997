"""Serve compressed caches from vLLM: export them, load them in the engine, ask about them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtool.engines.vllm.format import read_exported
from kvtool.errors import UsageError


def prompt(file: str | Path, question: Sequence[int] | str, tokenizer: Any = None) -> list[int]:
    """Return the token ids of a prompt: a cache's virtual ids and the question behind them.

    A text is put behind the cached one as `kvtool generate --cache` does it. If the cached text is
    in an open chat message, the question goes on with it, and the answer begins behind.

    Args:
        file: that `kvtool export` has written.
        question: its token ids, without those that begin a text; or the text itself.
        tokenizer: of the model, for a text.

    Raises:
        UsageError: no such file, no question, or a text without a tokenizer.
    """
    path = Path(os.path.expanduser(file))
    try:
        exported = read_exported(path)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    if isinstance(question, str):
        ids = _encode(exported.metadata, question, tokenizer)
    else:
        ids = list(question)
    if not ids:
        raise UsageError("no question: an answer needs at least one token behind the cache")
    return [*exported.ids, *ids]


def _encode(metadata: Any, question: str, tokenizer: Any) -> list[int]:
    """Return the token ids of a question."""
    if tokenizer is None:
        raise UsageError("a question in words needs the tokenizer of the model")
    from kvtool.models.chat import continued_ids

    before, after = metadata.get("question_before", ""), metadata.get("question_after", "")
    return continued_ids(tokenizer, f"{before}{question}{after}")
