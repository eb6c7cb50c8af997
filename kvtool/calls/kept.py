"""The kept text of a call that was asked to show it: a page, or on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtool.calls.settings import PromptSettings
from kvtool.documents.files import write_text
from kvtool.models.load import Loaded
from kvtool.watcher import Watcher

if TYPE_CHECKING:
    from kvtool.cache.whole.cache import KVCache
    from kvtool.report.kept.text import KeptText


def show_kept(
    settings: PromptSettings,
    loaded: Loaded,
    cache: KVCache,
    watcher: Watcher,
    *,
    new_tokens: int = 0,
    answer: str | None = None,
) -> None:
    """Show what a cache holds of its text, where that was asked for.

    Args:
        new_tokens: at the end of the text that were generated.
        answer: these in words.

    Raises:
        KvtoolError: the page cannot be written.
    """
    if settings.show is not None:
        text = lay_out(loaded, cache, new_tokens=new_tokens, answer=answer)
        show_texts(settings, [text], watcher)


def show_texts(
    settings: PromptSettings,
    texts: Sequence[KeptText],
    watcher: Watcher,
    full_answer: str | None = None,
) -> None:
    """Write the page of kept texts, or show them on the terminal.

    Args:
        full_answer: of the full cache, where that was asked for.
    """
    path = settings.show_path
    if path is None:
        watcher.show_kept(texts)
        return
    from kvtool.report.kept.text import kept_page

    write_text(path, kept_page(texts, full_answer))
    watcher.note(f"kept text in {path}")


def lay_out(
    loaded: Loaded, cache: KVCache, *, new_tokens: int = 0, answer: str | None = None
) -> KeptText:
    """Return the kept text of a cache whose last tokens were generated."""
    from kvtool.report.kept.text import kept_text

    known = cache.input_ids
    prompt = None if known is None or not new_tokens else known.shape[1] - new_tokens
    return kept_text(cache, loaded.tokenizer, prompt_tokens=prompt, answer=answer)
