"""The texts of a profile, all of one length: written by us, from a file, or from a dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvtool.documents.files import expand
from kvtool.documents.profile import ProfileData
from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.samples.data import Data, documents
from kvtool.evaluation.samples.data_files import check_file
from kvtool.evaluation.samples.sample import token_counter

if TYPE_CHECKING:
    from torch import Tensor

BUILTIN = "builtin"


def draw_texts(
    tokenizer: Any,
    *,
    source: str,
    samples: int,
    tokens: int,
    seed: int,
    given: Sequence[str] | None = None,
) -> tuple[list[Tensor], ProfileData]:
    """Return (1, tokens) int64 for each text, and where they are from.

    Args:
        source: `builtin`, a file, a folder of text files, or the name of a dataset.
        given: texts in place of those of the source.

    Raises:
        UsageError: no such file, no text of `tokens` tokens.
        KvtoolError: data that cannot be read.
    """
    import torch

    if given is not None:
        source = "texts"
        texts, fingerprint = _from_texts(tokenizer, given, samples, tokens)
    else:
        draw = _builtin if source == BUILTIN else _from_data
        texts, fingerprint = draw(tokenizer, source, samples, tokens, seed)
    data = ProfileData(
        source=source, samples=len(texts), tokens=tokens, seed=seed, fingerprint=fingerprint
    )
    return [torch.tensor([ids]) for ids in texts], data


def check_source(source: str) -> None:
    """Refuse a file that is not there, before anything is loaded."""
    if source == BUILTIN:
        return

    path = Data.model_validate(source).path
    if path is not None and not expand(path).is_dir():
        check_file(expand(path), task="--data")


def _builtin(
    tokenizer: Any, source: str, samples: int, tokens: int, seed: int
) -> tuple[list[list[int]], str]:
    """Write prose that looks back on itself, and cut it to length."""
    from kvtool.evaluation.samples.passages import recap_passage

    counter = token_counter(tokenizer, None)
    texts, sha = [], hashlib.sha256()
    for index in range(samples):
        length = max(256, tokens)
        ids: list[int] = []
        while len(ids) < tokens:
            length += 128
            ids = _encode(tokenizer, recap_passage("profile", seed, length, index, counter))
        texts.append(ids[:tokens])
        sha.update(f"{ids[:tokens]}\n".encode())
    return texts, sha.hexdigest()


def _from_texts(
    tokenizer: Any, given: Sequence[str], samples: int, tokens: int
) -> tuple[list[list[int]], str]:
    """Cut texts that a caller has given into pieces, in their order."""
    sha = hashlib.sha256()
    for text in given:
        sha.update(f"{len(text)}\n{text}".encode())
    return _cut("texts: none", tokenizer, given, samples, tokens), sha.hexdigest()


def _from_data(
    tokenizer: Any, source: str, samples: int, tokens: int, seed: int
) -> tuple[list[list[int]], str]:
    """Cut texts into pieces: the first of each, in random order, before the second of any."""
    from kvtool.evaluation.samples.fit import generator

    data = Data.model_validate(source)
    try:
        texts, fingerprint = documents(data, task="--data")
    except KvtoolError as error:
        names = "give the name of a dataset on the hub, a file, or builtin"
        raise UsageError(error.message, hint=error.hint if data.path else names) from error
    order = generator(seed, "profile").permutation(len(texts))
    ordered = [texts[i][1] for i in order]
    return _cut(f"--data: no text of `{source}`", tokenizer, ordered, samples, tokens), fingerprint


def _cut(
    none: str, tokenizer: Any, texts: Sequence[str], samples: int, tokens: int
) -> list[list[int]]:
    """Cut texts into pieces of `tokens` tokens.

    Args:
        none: how an error begins that says that there is none.
    """
    pieces = list(_pieces(tokenizer, texts, samples, tokens))
    if not pieces:
        longest = max((len(_encode(tokenizer, text)) for text in texts), default=0)
        raise UsageError(
            f"{none} has {tokens} tokens, the longest has {longest}", hint=f"--tokens {longest}"
        )
    return pieces


def _pieces(tokenizer: Any, texts: Sequence[str], samples: int, tokens: int) -> Iterator[list[int]]:
    long: list[list[int]] = []
    for text in texts:
        ids = _encode(tokenizer, text)
        if len(ids) >= tokens:
            yield ids[:tokens]
            long.append(ids)
        if len(long) == samples:
            return
    left = samples - len(long)
    most = max((len(ids) // tokens for ids in long), default=0)
    for start in (tokens * i for i in range(1, most)):
        for ids in long:
            if left > 0 and len(ids) >= start + tokens:
                yield ids[start : start + tokens]
                left -= 1


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text)["input_ids"]
