"""The text of a cache, token by token: shaded on a terminal, and a page of its layers and heads.

The page needs no other file. It holds the tokens of every layer and head, one bit each, compressed.
Its script unpacks them, shades the tokens and answers the switches.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.style import Style
from rich.text import Text

from kvtool.cache.whole.report import KeptTokens, kept_tokens
from kvtool.documents.files import write_text
from kvtool.documents.generation import CacheSection
from kvtool.errors import UsageError
from kvtool.models.folder import REFERENCE
from kvtool.models.load import load_tokenizer
from kvtool.report.colour_scale import colour_at, ink_on
from kvtool.report.templates import template

if TYPE_CHECKING:
    from torch import Tensor

    from kvtool.cache.whole.report import KeptTokens
    from kvtool.cache.whole.state import CacheState


@dataclass(frozen=True)
class KeptText:
    """A text token by token, and what a cache holds of it.

    Printed, it has in brackets what at least half of the layers and heads hold; in a notebook it is
    the page.

    Attributes:
        title: policy and budget.
        cost: what is held, in words.
        pieces: the text, token by token.
        kept: which layers and heads hold which token.
        prompt: tokens of the prompt; behind them the answer begins.
        answer: to the prompt; None where there is none.
    """

    title: str
    cost: str
    pieces: tuple[str, ...]
    kept: KeptTokens
    prompt: int
    answer: str | None = None

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
    known = cache.text
    texts = None if known.plain else known.input_ids
    texts = texts if input_ids is None else input_ids
    if texts is None or not cache.first_layer.is_initialized:
        raise UsageError(
            "the cache does not know its text: it has read nothing, or not through `generate`",
            hint="cache.show(tokenizer, input_ids=ids)",
        )
    batch, seen = len(cache.tokens_seen()), cache.get_seq_length()
    if not -batch <= row < batch or len(texts) != batch or texts.shape[1] < seen:
        shape = " x ".join(map(str, texts.shape))
        raise UsageError(
            f"the cache has read {batch} x {seen} tokens; input_ids are {shape}, row is {row}"
        )
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


def kept_page(texts: Sequence[KeptText], full_answer: str | None = None) -> str:
    """Return the page of one kept text, or of several side by side.

    Args:
        full_answer: what the full cache answers, where that was asked for.
    """
    return template("kept/kept.html").render(
        title=" and ".join(text.title for text in texts),
        texts=texts,
        full_answer=full_answer,
        verbs=sorted({doing(text.kept) for text in texts}),
        marks={mark: MARKS[mark] for text in texts if (mark := text.kept.mark) in MARKS},
        heads=max(len(layer.kept) for text in texts for layer in text.kept.layers),
        data=page_data(texts),
    )


def page_data(texts: Sequence[KeptText]) -> dict[str, Any]:
    """Return what the page's script reads.

    `pieces` are those of the prompt that all texts share, `more` of a text what follows. `kept` and
    `marked` are a bit for each token, those of a head in whole bytes (lowest bit first), heads and
    layers in order, compressed by zlib, in base64. `score` is a byte for each token.
    """
    shared = min(len(text.pieces) for text in texts)
    for text in texts[1:]:
        pairs = zip(texts[0].pieces[:shared], text.pieces, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), shared)
    return {
        "pieces": list(texts[0].pieces[:shared]),
        "texts": [_text_data(text, shared) for text in texts],
    }


def _text_data(text: KeptText, shared: int) -> dict[str, Any]:
    kept = text.kept
    marked = [layer.marked for layer in kept.layers if layer.marked is not None]
    return {
        "more": list(text.pieces[shared:]),
        "prompt": text.prompt,
        "layers": [[layer.index, len(layer.kept)] for layer in kept.layers],
        "kept": _packed([layer.kept for layer in kept.layers]),
        "mark": kept.mark,
        "reads": kept.reads,
        "marked": _packed(marked) if marked else None,
        "score": None if kept.score is None else _encoded(kept.score.numpy().tobytes()),
    }


def _packed(heads: list[Tensor]) -> str:
    import numpy

    bits = [numpy.packbits(head.numpy(), axis=-1, bitorder="little") for head in heads]
    return _encoded(b"".join(each.tobytes() for each in bits))


def _encoded(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


MARKS = {"merged": "merged into tokens that stay", "offloaded": "moved to host memory"}
"""Of evicted tokens, which are underlined."""


def doing(kept: KeptTokens) -> str:
    """Return what layers and heads do with a token that is shaded."""
    return f"read it in the last {kept.reads} steps" if kept.mark == "read" else "keep it"


PART = "⋯"
"""A token that ends inside a character; the character is shown at the last of its tokens."""

_BROKEN = "�"
_BEFORE = 4  # tokens in front, which a tokenizer may need to decode a token


def token_pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text.

    Joined, the pieces are the decoded text, but for the signs of tokens inside a character.

    Args:
        ids: of one text, special tokens included.
    """

    def decode(start: int, end: int) -> str:
        return str(tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False))

    pieces, done = [], 0  # the text of ids[:done] has been returned
    for end in range(1, len(ids) + 1):
        start = max(0, done - _BEFORE)
        told, text = decode(start, done), decode(start, end)
        piece = text[len(told) :] if text.startswith(told) else decode(done, end)
        if piece.endswith(_BROKEN) and end < len(ids) and end - done < _BEFORE:
            pieces.append(PART)
            continue
        pieces.append(piece or PART)
        done = end
    return pieces


_STEPS = 6
# from few layers and heads to all of them
SHADES = tuple("#{:02x}{:02x}{:02x}".format(*colour_at(i / (_STEPS - 1))) for i in range(_STEPS))
_HALF = 0.5  # of the layers and heads


def coloured_text(shown: KeptText) -> Text:
    """Return the text, each token on a background of its shade: see `KeptTokens.shade`.

    Tokens that no head holds are dim; merged and offloaded ones are underlined.
    """
    kept = shown.kept
    under = [False] * kept.tokens
    if kept.mark in MARKS:
        under = (kept.marked_share >= _HALF).tolist()
    shades, held = kept.shade.tolist(), (kept.share > 0).tolist()
    text = Text()
    for piece, *look in zip(shown.pieces, shades, held, under, strict=True):
        text.append(piece, _style(*look))
    return text


def _style(shade: float, held: bool, underline: bool) -> Style:
    if shade == 0:
        return Style(dim=not held, underline=underline)
    rank = min(int(shade * len(SHADES)), len(SHADES) - 1)
    return Style(color=ink_on(rank / (_STEPS - 1)), bgcolor=SHADES[rank], underline=underline)


def legend(shown: KeptText) -> Text:
    """Return what the shades mean."""
    text = Text("evicted", _style(0, False, False))
    for rank in range(len(SHADES)):
        shade = rank / len(SHADES)
        text.append(f" {(rank + 1) * 100 // len(SHADES)}% ", _style(shade or 0.01, True, False))
    text.append(f" of the layers and heads {doing(shown.kept)}")
    if shown.kept.mark in MARKS:
        text.append("; ")
        text.append(MARKS[shown.kept.mark], _style(0, True, True))
    return text


def legend_of_brackets(shown: KeptText) -> str:
    """Return what the brackets mean."""
    return f"[..]: at least half of the layers and heads {doing(shown.kept)}"


def in_brackets(shown: KeptText) -> str:
    """Return the text with what at least half of the layers and heads hold in brackets.

    Of a reader, with what at least half of them have read lately.
    """
    shades = shown.kept.shade.tolist()
    pairs = zip(shown.pieces, (shade >= _HALF for shade in shades), strict=True)
    runs = []
    for held, run in groupby(pairs, key=lambda pair: pair[1]):
        joined = "".join(piece for piece, _ in run)
        runs.append(f"[{joined}]" if held else joined)
    return "".join(runs)
