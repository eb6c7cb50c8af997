"""Profiles measured in one call: texts drawn, the model loaded, the document put together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kvtool.cache.files.heads import heads_metadata
from kvtool.cache.files.tensor_file import digest_of_file, write_tensors
from kvtool.documents.memory import ModelShape
from kvtool.documents.profile import HeadsFile, Metrics, ProfileDocument
from kvtool.errors import UsageError
from kvtool.evaluation.run.environment import without_home
from kvtool.evaluation.samples.profile_texts import draw_texts
from kvtool.model_shape import trained_length
from kvtool.models.attached import ModelSource
from kvtool.models.folder import REFERENCE
from kvtool.profiling.measure import measure
from kvtool.profiling.memory import memory_table
from kvtool.profiling.request import ProfileRequest
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
    texts, data = draw_texts(
        tokenizer,
        source=request.data,
        samples=request.samples,
        tokens=request.tokens,
        seed=request.seed,
        given=request.texts,
    )
    if len(texts) < request.samples:
        watcher.note(f"note: {data.source} has only {len(texts)} texts of {request.tokens} tokens")
    watcher.note_any(source.note())
    with source.attached(note=watcher.note, progress=watcher.shows_progress) as loaded:
        with watcher.progress(len(texts)) as advance:
            found = measure(loaded.model, texts, plan, lambda done: advance(f"text {done}"))
        dtype = str(loaded.model.dtype).removeprefix("torch.")
        memory = memory_table(loaded.model.config, dtype) if plan.memory else None
        metrics, curves = summarise(found, plan, memory)
        shape = ModelShape.of(
            loaded.model.config,
            name=without_home(loaded.name),
            revision=loaded.revision,
            dtype=dtype,
        )
    where = {"source": without_home(data.source), "decode": plan.steps or None}
    document = ProfileDocument(
        model=shape,
        data=data.model_copy(update=where),
        metrics=metrics,
        curves=curves,
        heads_file=_save_heads(heads_path, found),
    )
    return Profiled(document, found)


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
