"""The text of a cache, token by token, with the slots that hold each."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.cache.kept import kept_tokens
from kvtool.documents.files import write_text
from kvtool.documents.generation import CacheSection
from kvtool.errors import UsageError
from kvtool.models.folder import REFERENCE
from kvtool.models.load import load_tokenizer
from kvtool.report.kept.page import kept_page
from kvtool.report.kept.shaded import ShadedText, token_pieces
from kvtool.report.kept.terminal import in_brackets

if TYPE_CHECKING:
    from torch import Tensor

    from kvtool.cache.state import CacheState


class KeptText(ShadedText):
    """A text that shows what a cache holds of it.

    Printed, it has in brackets what at least half of the layers and heads hold; in a notebook it is
    the page.
    """

    @property
    def html(self) -> str:
        """The page, one file that needs no other."""
        return kept_page([self])

    def save(self, path: str | Path) -> None:
        """Write the page, whole or not at all.

        Raises:
            KvtoolError: the file cannot be written.
        """
        write_text(Path(path), self.html)

    def __str__(self) -> str:
        return in_brackets(self)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the page, apart from the notebook's own styles."""
        frame = 'style="width: 100%; height: 36rem; border: 0"'
        return f'<iframe {frame} title="kept text" srcdoc="{escape(self.html)}"></iframe>'


def kept_text(
    cache: CacheState,
    tokenizer: Any = None,
    *,
    input_ids: Tensor | None = None,
    row: int = 0,
    prompt_tokens: int | None = None,
    answer: str | None = None,
) -> KeptText:
    """Lay out what a cache holds of its text.

    Args:
        tokenizer: None takes that of the folder or hub ID that the model came from.
        input_ids: (batch, n) the text, padding on its left; None takes the text that the cache has
            from `generate`, kvtool or a file. After plain forwards it is unknown on which side they
            were padded.
        row: the batch entry.
        prompt_tokens: how many tokens of it are the prompt; None: all.
        answer: to the prompt.

    Raises:
        UsageError: nothing has been read, the text is unknown, or it is another one.
        KvtoolError: the tokenizer cannot be loaded.
    """
    ids = _ids(cache, input_ids, row)
    if tokenizer is None:
        tokenizer = _own_tokenizer(cache)
    budget = "" if cache.budget is None else f", budget {cache.budget}"
    return KeptText(
        title=f"{cache.policy}{budget}",
        cost=CacheSection.taken_from(cache.report()).in_words(),
        pieces=tuple(token_pieces(tokenizer, ids)),
        kept=kept_tokens(cache, row),
        prompt=len(ids) if prompt_tokens is None else min(prompt_tokens, len(ids)),
        answer=answer,
    )


def _ids(cache: CacheState, input_ids: Tensor | None, row: int) -> list[int]:
    """Return the tokens of a batch entry that have been read."""
    if not cache.first_layer.is_initialized:
        raise UsageError("the cache is empty: nothing has been fed to it yet")
    known = cache.text
    texts = None if known.plain else known.input_ids
    texts = texts if input_ids is None else input_ids
    if texts is None:
        raise UsageError(
            "the cache does not know its text, which did not come through `generate`",
            hint="cache.show(tokenizer, input_ids=ids)",
        )
    batch, seen = len(cache.tokens_seen()), cache.get_seq_length()
    if not -batch <= row < batch:
        raise UsageError(f"the cache holds {batch} texts, and row {row} is asked for")
    if len(texts) != batch or texts.shape[1] < seen:
        shape = " x ".join(map(str, texts.shape))
        raise UsageError(f"the cache has read {batch} x {seen} tokens, and input_ids are {shape}")
    ids: list[int] = texts[row, seen - cache.tokens_seen()[row] : seen].tolist()
    return ids


def _own_tokenizer(cache: CacheState) -> Any:
    """Load the tokenizer of the model that a cache was built for, by the model's name."""
    model = cache.link.model()
    name = "" if model is None else model.name_or_path
    if not name:
        raise UsageError(
            "nobody knows the tokenizer of this cache's model", hint="cache.show(tokenizer)"
        )
    return load_tokenizer(None if name == REFERENCE else name)[0]
