"""List the numbers of a document in rows, for data frames and CSV."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from kvtool.documents.generation import GenerationDocument, TurnSection
from kvtool.documents.plan import PlanDocument
from kvtool.documents.profile import MemoryTable, ProfileDocument
from kvtool.documents.results import ResultsDocument
from kvtool.report.costs import is_tested
from kvtool.report.measurements import measured
from kvtool.report.plans import stored_tokens

_Record = dict[str, Any]


@singledispatch
def rows_of(document: Any) -> list[_Record]:
    """Return the rows of a document, all with the same keys."""
    raise TypeError(f"{type(document).__name__} has no rows")


@rows_of.register
def _results(document: ResultsDocument) -> list[_Record]:
    variants = {variant.name: variant for variant in document.variants}
    costs = [result.cost for result in document.results if result.cost is not None]
    names = list(type(costs[0]).model_fields) if costs else []
    return [
        {
            "variant": result.variant,
            "policy": variants[result.variant].policy,
            "label": variants[result.variant].label or variants[result.variant].policy,
            "budget": variants[result.variant].budget,
            "codec": variants[result.variant].codec,
            "task": result.task,
            "question": result.question,
            "metric": result.metric,
            "value": result.value,
            "stderr": result.stderr,
            "n": result.n,
            "delta": result.delta,
            "low": result.paired.low if result.paired else None,
            "high": result.paired.high if result.paired else None,
            "failed": result.failed,
            "tests_compression": is_tested(result, variants[result.variant]),
            **{name: getattr(result.cost, name, None) for name in names},
        }
        for result in document.results
    ]


@rows_of.register
def _plan(document: PlanDocument) -> list[_Record]:
    stored, layers = stored_tokens(document), document.layers
    shares = layers.fractions or [None] * len(stored)
    together = zip(document.model.layer_types, layers.tokens, stored, shares, strict=True)
    return [
        {
            "layer": i,
            "type": kind,
            "planned": i in document.free_layers,
            "tokens": tokens,
            "stored": held,
            "fraction": share,
        }
        for i, (kind, tokens, held, share) in enumerate(together)
    ]


@rows_of.register
def _profile(document: ProfileDocument) -> list[_Record]:
    lines = measured(document.metrics)
    if not lines and document.metrics.memory is not None:
        return _memory(document.metrics.memory)
    count = len(lines[0][1]) if lines else 0
    return [{"layer": i, **{title: values[i] for title, values in lines}} for i in range(count)]


def _memory(memory: MemoryTable) -> list[_Record]:
    table = zip(memory.contexts, memory.bytes, strict=True)
    return [
        {"context": tokens, "batch": batch, "bytes": size}
        for tokens, row in table
        for batch, size in zip(memory.batches, row, strict=True)
    ]


@rows_of.register
def _generation(document: GenerationDocument) -> list[_Record]:
    return [_answer(each, document) for each in document.turns or (document,)]


def _answer(answer: GenerationDocument | TurnSection, document: GenerationDocument) -> _Record:
    cache, timing, close = answer.cache, answer.timing, answer.fidelity
    return {
        "model": document.model,
        "policy": document.policy,
        "budget": document.budget,
        "user": getattr(answer, "user", None),
        "text": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": answer.new_tokens,
        "tokens_seen": cache.tokens_seen,
        "kept_tokens": max(cache.kept_per_layer),
        "kv_bytes": cache.kv_bytes,
        "state_bytes": cache.state_bytes,
        "full_bytes": cache.full_bytes,
        "prefill_s": timing.prefill_s,
        "decode_s": timing.decode_s,
        "decode_tokens_per_s": timing.decode_tokens_per_s,
        "agreement": None if close is None else close.agreement,
        "kl": None if close is None else close.kl,
    }
