"""The kept text as one HTML file, to read, send and switch through layers and heads.

The file needs no other file. It holds the tokens of every layer and head, one bit each, compressed.
Its script unpacks them, shades the tokens and answers the switches.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kvtool.package_data import data_file
from kvtool.report.kept.shaded import MARKS, doing

if TYPE_CHECKING:
    from torch import Tensor

    from kvtool.report.kept.shaded import ShadedText


def kept_page(texts: Sequence[ShadedText], full_answer: str | None = None) -> str:
    """Return the page of one kept text, or of several side by side.

    Args:
        full_answer: what the full cache answers, where that was asked for.
    """
    folder = data_file("report/kept/kept.html").parent
    environment = Environment(
        loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined
    )
    marks = {text.kept.mark for text in texts}
    title = " and ".join(text.title for text in texts)
    return environment.get_template("kept.html").render(
        title=title,
        texts=texts,
        full_answer=full_answer,
        verbs=sorted({doing(text.kept) for text in texts}),
        marks={mark: words for mark, words in MARKS.items() if mark in marks},
        scored=any(text.kept.score is not None for text in texts),
        layers=[layer.index for layer in texts[0].kept.layers],
        heads=max(len(layer.kept) for text in texts for layer in text.kept.layers),
        data=Markup(_spell(page_data(texts))),
    )


def page_data(texts: Sequence[ShadedText]) -> dict[str, Any]:
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


def _text_data(text: ShadedText, shared: int) -> dict[str, Any]:
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


def _spell(data: dict[str, Any]) -> str:
    """Write JSON that no script element ends in."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
