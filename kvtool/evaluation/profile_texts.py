"""The texts of a profile: written by us, from a file, a dataset, or of a task with its answers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvtool.documents.files import expand
from kvtool.documents.profile import ProfileData
from kvtool.errors import KvtoolError, UsageError
from kvtool.evaluation.bench.prompts import first_prompt
from kvtool.evaluation.samples.data import Data, documents
from kvtool.evaluation.samples.data_files import check_file
from kvtool.evaluation.samples.fit import generator
from kvtool.evaluation.samples.passages import recap_passage
from kvtool.evaluation.samples.sample import token_counter
from kvtool.evaluation.tasks.asking import Filled
from kvtool.evaluation.tasks.table import TASKS, task_class
from kvtool.models.chat import Piece, make_frame, piece_ids
from kvtool.profiling.answer_loss import AskedText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


def _builtin(
    tokenizer: Any, source: str, samples: int, tokens: int, seed: int
) -> tuple[list[list[int]], str]:
    """Write prose that looks back on itself, and cut it to length."""
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
    """Cut texts into pieces; `none` begins the error that says that there is none."""
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


def is_task(source: str) -> bool:
    """Return whether a source of texts is a task that draws its samples and has one answer."""
    return _class_of(source) is not None


def _class_of(source: str) -> type[Filled] | None:
    task = task_class(source) if source in TASKS else None
    return task if task is not None and issubclass(task, Filled) and task.one_answer else None


def check_source(source: str, metrics: Sequence[str]) -> None:
    """Refuse a file that is not there, and questions that no metric reads, before anything loads.

    Raises:
        UsageError: such a file, or a task beside other metrics than `answer_loss`.
    """
    if not is_task(source):
        path = None if source == BUILTIN else Data.model_validate(source).path
        if path is not None and not expand(path).is_dir():
            check_file(expand(path), task="--data")
        return
    others = [name for name in metrics if name != "answer_loss"]
    if others:
        raise UsageError(
            f"--data {source} has questions, which answer_loss alone reads; {others[0]} does not",
            hint="--metrics answer_loss",
        )


def draw_asked(
    tokenizer: PreTrainedTokenizerBase, *, task: str, samples: int, tokens: int, seed: int
) -> tuple[list[AskedText], ProfileData]:
    """Return contexts of a task, each with its question and its right answer, and what they are.

    Args:
        task: a name for which `is_task` is true.
        tokens: of a prompt and the longest answer together.

    Raises:
        UsageError: a length that is too short for the task.
    """
    cls = _class_of(task)
    assert cls is not None, f"`{task}` draws no samples with one answer"
    spread = {"depths": samples} if "depths" in cls.model_fields else {"samples": samples}
    drawn = cls(name=task, lengths=(tokens,), seed=seed, **spread)
    frame = make_frame(tokenizer, "auto", drawn.chat, thinking=drawn.enable_thinking)
    texts, sha = [], hashlib.sha256()
    for sample in drawn.draw(token_counter(tokenizer, None)):
        turn = sample.turns[0]
        prompt = first_prompt(tokenizer, frame, sample, max_length=None, truncate="error")
        ids = tokenizer(prompt.context, add_special_tokens=prompt.special)["input_ids"]
        question = piece_ids(tokenizer, Piece(prompt.context, prompt.question))
        space = " " if turn.answer_prefix else ""
        before = prompt.context + prompt.question
        answer = piece_ids(tokenizer, Piece(before, space + turn.references[0]))
        sha.update(f"{ids}\n{question}\n{answer}\n".encode())
        texts.append(
            AskedText(torch.tensor([ids]), torch.tensor([question + answer]), len(question))
        )
    data = ProfileData(
        source=task, samples=len(texts), tokens=tokens, seed=seed, fingerprint=sha.hexdigest()
    )
    return texts, data
