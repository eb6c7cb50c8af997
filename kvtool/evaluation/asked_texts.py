"""Contexts of a task, each with a question and its right answer, which a profile reads on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvtool.documents.profile import ProfileData
from kvtool.errors import UsageError
from kvtool.evaluation.bench.prompts import first_prompt
from kvtool.evaluation.samples.profile_texts import check_source as check_file
from kvtool.evaluation.samples.sample import token_counter
from kvtool.evaluation.tasks.asking import Drawn
from kvtool.evaluation.tasks.table import TASKS, task_class
from kvtool.models.chat import Piece, make_frame, piece_ids
from kvtool.profiling.answer_loss import AskedText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def is_task(source: str) -> bool:
    """Return whether a source of texts is a task that draws its samples and has one answer."""
    return _class_of(source) is not None


def _class_of(source: str) -> type[Drawn] | None:
    task = task_class(source) if source in TASKS else None
    return task if task is not None and issubclass(task, Drawn) and task.one_answer else None


def check_source(source: str, metrics: Sequence[str]) -> None:
    """Refuse a file that is not there, and questions that no metric reads, before anything loads.

    Raises:
        UsageError: such a file, or a task beside other metrics than `answer_loss`.
    """
    if not is_task(source):
        check_file(source)
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
