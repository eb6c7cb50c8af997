"""Profiles measured in one call: texts drawn, the model loaded, the document put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvtool.cache.tensor_files.heads import heads_metadata
from kvtool.cache.tensor_files.tensor_file import digest_of_file, write_tensors
from kvtool.documents.memory import ModelShape
from kvtool.documents.profile import HeadsFile, Metrics, ProfileData, ProfileDocument
from kvtool.errors import UsageError
from kvtool.evaluation.profile_texts import draw_asked, draw_texts, is_task
from kvtool.evaluation.run.environment import without_home
from kvtool.model_shape import trained_length
from kvtool.models.attached import ModelSource
from kvtool.models.folder import REFERENCE
from kvtool.profiling.answer_loss import AskedText, answer_loss, head_losses
from kvtool.profiling.measure import measure
from kvtool.profiling.memory_table import memory_table
from kvtool.profiling.request import Plan, ProfileRequest
from kvtool.profiling.summary import summarise
from kvtool.watcher import Watcher


@dataclass(frozen=True)
class Profiled:
    """A profile, and the numbers per head behind it by name."""

    document: ProfileDocument
    heads: dict[str, Tensor]


def run_profile(
    request: ProfileRequest, source: ModelSource, *, heads_path: Path | None, watcher: Watcher
) -> Profiled:
    """Measure a profile.

    Args:
        heads_path: where the numbers per head go, None for nowhere.
        watcher: gets the progress.
    """
    if request.memory_alone:
        return Profiled(_memory_alone(source, watcher), {})
    plan = request.plan
    tokenizer, config = source.tokenizer()
    _check_length(config, request.tokens, plan.steps)
    lost = "answer_loss" in plan.metrics
    texts, data = _draw(request, tokenizer)
    if lost and len(texts) < 2:
        raise UsageError(
            f"answer_loss needs 2 texts or more, to say how sure it is; {data.source} has one of "
            f"{request.tokens + plan.steps} tokens",
            hint=f"--tokens {request.tokens // 2}",
        )
    if len(texts) < request.samples:
        watcher.note(f"note: {data.source} has only {len(texts)} texts of {request.tokens} tokens")
    watcher.note_any(source.note())
    with source.attached(note=watcher.note, progress=watcher.shows_progress) as loaded:
        found, losses, by_head = dict[str, Tensor](), None, None
        if plan.metrics != ("answer_loss",):
            prompts = [text.prompt for text in texts]
            with watcher.progress(len(texts)) as advance:
                found = measure(loaded.model, prompts, plan, lambda done: advance(f"text {done}"))
        if lost:
            losses, by_head = _losses(loaded.model, texts, plan, watcher)
            found["answer_loss"] = (losses[:, :, None] if by_head is None else by_head).mean(0)
        dtype = str(loaded.model.dtype).removeprefix("torch.")
        memory = memory_table(loaded.model.config, dtype) if plan.memory else None
        metrics, curves = summarise(found, plan, memory, losses, by_head)
        shape = ModelShape.of(
            loaded.model.config,
            name=without_home(loaded.name),
            revision=loaded.revision,
            dtype=dtype,
        )
    decoded = None if is_task(request.data) and request.texts is None else plan.steps
    where = {"source": without_home(data.source), "decode": decoded or None}
    document = ProfileDocument(
        model=shape,
        data=data.model_copy(update=where),
        metrics=metrics,
        curves=curves,
        heads_file=_save_heads(heads_path, found),
    )
    return Profiled(document, found)


def _draw(request: ProfileRequest, tokenizer: Any) -> tuple[list[AskedText], ProfileData]:
    """Return the texts, each with how it goes on where that is read."""
    plan, source, seed = request.plan, request.data, request.seed
    if request.texts is None and is_task(source):
        size = {"samples": request.samples, "tokens": request.tokens}
        return draw_asked(tokenizer, task=source, seed=seed, **size)
    steps = plan.steps if "answer_loss" in plan.metrics else 0
    texts, data = draw_texts(
        tokenizer,
        source=source,
        samples=request.samples,
        tokens=request.tokens + steps,
        seed=seed,
        given=request.texts,
    )
    cut = [AskedText(text[:, : request.tokens], text[:, request.tokens :]) for text in texts]
    return cut, data.model_copy(update={"tokens": request.tokens})


def _losses(
    model: PreTrainedModel, texts: Sequence[AskedText], plan: Plan, watcher: Watcher
) -> tuple[Tensor, Tensor | None]:
    """Measure `answer_loss`: (samples, layers, budgets), and of KV heads if they are asked for."""
    assert plan.policy is not None, "answer_loss is measured of a policy"
    found, by_head = [], []
    with watcher.progress(len(texts)) as advance:
        for text in texts:
            found.append(answer_loss(model, plan.policy, plan.budgets, text))
            if plan.heads:
                by_head.append(head_losses(model, plan.policy, plan.budgets, text))
            advance(f"text {len(found)}")
    return torch.stack(found), torch.stack(by_head) if by_head else None


def _memory_alone(source: ModelSource, watcher: Watcher) -> ProfileDocument:
    if source.name is None:
        watcher.note_any(source.note())
    config = source.config()
    revision = source.revision or getattr(config, "_commit_hash", None)
    name = source.name or REFERENCE
    return ProfileDocument(
        model=ModelShape.of(config, name=name, revision=revision, dtype=source.dtype),
        metrics=Metrics(memory=memory_table(config, source.dtype)),
    )


def _check_length(config: Any, tokens: int, steps: int) -> None:
    limit = trained_length(config)
    if limit is not None and tokens + steps > limit:
        length = f"{tokens} tokens" + (f" and {steps} decoded" if steps else "")
        raise UsageError(
            f"{length} are more than the {limit} positions of this model",
            hint=f"--tokens {limit - steps}"
            if limit > steps
            else f"--decode {limit // 2} or fewer",
        )


def _save_heads(path: Path | None, found: dict[str, Tensor]) -> HeadsFile | None:
    """Write the numbers per head, whole or not at all."""
    if path is None:
        return None
    tensors = {name: values.contiguous() for name, values in sorted(found.items())}
    metadata = heads_metadata(tensors)
    write_tensors(path, tensors, metadata)
    return HeadsFile(path=path.name, sha256=digest_of_file(tensors, metadata))
