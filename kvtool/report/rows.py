"""List the numbers of a document in rows, for data frames and CSV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtool.documents.generation import GenerationDocument
from kvtool.documents.plan import PlanDocument
from kvtool.documents.profile import MemoryTable, ProfileDocument
from kvtool.documents.results import ResultsDocument
from kvtool.evaluation.costs import is_tested
from kvtool.report.measurements import measured
from kvtool.report.plans import stored_tokens

_Record = dict[str, Any]


def _results(document: ResultsDocument) -> list[_Record]:
    variants = {variant.name: variant for variant in document.variants}
    costs = [result.cost for result in document.results if result.cost is not None]
    names = list(type(costs[0]).model_fields) if costs else []
    rows = []
    for result in document.results:
        variant, pair = variants[result.variant], result.paired
        of_result = ("task", "question", "metric", "value", "stderr", "n", "delta")
        rows.append(
            {
                "variant": variant.name,
                "policy": variant.policy,
                "label": variant.label or variant.policy,
                "budget": variant.budget,
                "codec": variant.codec,
                **{name: getattr(result, name) for name in of_result},
                "low": pair.low if pair else None,
                "high": pair.high if pair else None,
                "failed": result.failed,
                "tests_compression": is_tested(result, variant),
                **{name: getattr(result.cost, name, None) for name in names},
            }
        )
    return rows


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


def _profile(document: ProfileDocument) -> list[_Record]:
    lines = measured(document.metrics)
    if not lines and document.metrics.memory is not None:
        return _memory(document.metrics.memory)
    count = len(lines[0][1]) if lines else 0
    return [{"layer": i, **{title: values[i] for title, values in lines}} for i in range(count)]


def _memory(memory: MemoryTable) -> list[_Record]:
    return [
        {"context": tokens, "batch": batch, "bytes": size}
        for tokens, row in zip(memory.contexts, memory.bytes, strict=True)
        for batch, size in zip(memory.batches, row, strict=True)
    ]


def _generation(document: GenerationDocument) -> list[_Record]:
    of_cache = ("kv_bytes", "state_bytes", "full_bytes")
    of_time = ("prefill_s", "decode_s", "decode_tokens_per_s")
    return [
        {
            "model": document.model,
            "policy": document.policy,
            "budget": document.budget,
            "user": getattr(answer, "user", None),
            "text": answer.text,
            "prompt_tokens": answer.prompt_tokens,
            "new_tokens": answer.new_tokens,
            "tokens_seen": answer.cache.tokens_seen,
            "kept_tokens": max(answer.cache.kept_per_layer),
            **{name: getattr(answer.cache, name) for name in of_cache},
            **{name: getattr(answer.timing, name) for name in of_time},
            **{name: getattr(answer.fidelity, name, None) for name in ("agreement", "kl")},
        }
        for answer in document.turns or (document,)
    ]


_ROWS: dict[str, Callable[[Any], list[_Record]]] = {
    "results": _results,
    "plan": _plan,
    "profile": _profile,
    "generation": _generation,
}


def rows_of(document: Any) -> list[_Record]:
    """Return the rows of a document, all with the same keys."""
    return _ROWS[document.kind](document)
