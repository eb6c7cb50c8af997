"""Results documents as a run would write them, small numbers made up by formulas."""

from __future__ import annotations

import math

from kvtool.documents.results import (
    Average,
    CellEntry,
    Cost,
    CurveEntry,
    Environment,
    GateResult,
    MetricEntry,
    ModelUsed,
    ResultsDocument,
    TaskResult,
    VariantEntry,
)

POLICIES = {  # how much of a perfect score a policy keeps at the smallest budget
    "streaming": 0.25,
    "h2o": 0.45,
    "h2o+caote": 0.6,
    "tova": 0.55,
    "roco": 0.7,
    "snapkv": 0.8,
}
BUDGETS = (64, 128, 256)
CODECS = {"int8": 18, "fp8": 18, "int4": 10, "int4(rotate=false)": 10}  # bytes of 16 channels
BITS = ("h2o", "h2o+int8", "h2o+int4", "snapkv", "snapkv+int8", "snapkv+int4", "full+int8")
LENGTHS = (256, 384, 512, 640, 768, 1024)
DEPTHS = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
LAYERS = 6


def variants(policies=POLICIES, budgets=BUDGETS) -> list[VariantEntry]:
    found = [VariantEntry(name="full", policy="full", budget=None, prefill="full")]
    for policy in policies:
        base, _, codec = policy.rpartition("+")
        own = {"policy": policy, "prefill": "full", "codec": codec if codec in CODECS else None}
        if base == "full":
            found.append(VariantEntry(name=policy, budget=None, **own))
        else:
            found += [VariantEntry(name=f"{policy}@{b}", budget=b, **own) for b in budgets]
    return found


def quality(variant: VariantEntry) -> float:
    """From 0 to 1; 1 for the full cache."""
    if variant.budget is None:
        return 1.0
    base = variant.policy.removesuffix(f"+{variant.codec}")
    return min(1.0, POLICIES.get(base, 0.5) + 0.1 * math.log2(int(variant.budget) / 64))


def cost(variant: VariantEntry, prompt: int = 640, new: int = 8) -> Cost:
    kept = prompt + new if variant.budget is None else int(variant.budget)
    slot, whole = 2 * LAYERS * 2 * CODECS.get(variant.codec, 16 * 4), 2 * LAYERS * 2 * 16 * 4
    rate = 40.0 if variant.budget is None else 36 + 512 / int(variant.budget)
    return Cost(
        prompt_tokens=prompt,
        new_tokens=new,
        kept_tokens=kept,
        kv_bytes=slot * kept,
        state_bytes=0 if variant.policy in ("full", "streaming") else 48 * kept,
        full_bytes=whole * (prompt + new),
        peak_kv_bytes=slot * (prompt + new),
        traffic_pairs=prompt,
        traffic_bytes=slot * prompt,
        peak_memory_bytes=None,
        prefill_s=0.25 if variant.budget is None else 0.3,
        decode_s=new / rate,
        prefill_tokens_per_s=prompt / (0.25 if variant.budget is None else 0.3),
        decode_tokens_per_s=rate,
        allocated_bytes=slot * (kept + 4),
        kept_per_layer=[kept + layer for layer in range(LAYERS)],
    )


def result(variant: VariantEntry, task: str, value: float | None, full: float | None, **changes):
    """One task under one variant; `full` is the value of the full cache."""
    fields = {
        "variant": variant.name,
        "task": task,
        "version": 1,
        "metric": "em",
        "value": value,
        "n": 20,
        "stderr": 0.03,
        "delta": None if value is None or full is None else value - full,
        "best": 1.0,
        "lower_is_better": False,
        "query_aware": True,
        "protocol": "plain",
        "settings": {},
        "fingerprint": "5f1d",
        "failed": 0,
        "metrics": [],
        "cells": [],
        "curves": [],
        "cost": cost(variant),
    }
    fields.update(changes)
    if not fields["metrics"]:
        names = ("metric", "value", "n", "stderr")
        fields["metrics"] = [
            MetricEntry(name=fields["metric"], **{k: fields[k] for k in names[1:]})
        ]
    return TaskResult(**fields)


def niah(variant: VariantEntry) -> TaskResult:
    """Recent needles are found, early ones the less the longer the context."""
    cells = []
    for length in LENGTHS:
        for depth in DEPTHS:
            reach = quality(variant) * 1.3 - (length / 1024) * (1 - depth / 100) * 0.9
            value = 1.0 if variant.budget is None else max(0.0, min(1.0, reach))
            cells.append(
                CellEntry(at={"length": length, "depth": depth}, value=value, n=4, stderr=0.1)
            )
    mean = sum(cell.value for cell in cells) / len(cells)
    return result(variant, "niah", mean, 1.0, cells=cells, n=4 * len(cells), stderr=0.02)


def multikey(variant: VariantEntry) -> TaskResult:
    value = 96 * quality(variant)
    cells = [
        CellEntry(at={"length": length}, value=value * (1.1 - length / 5120), n=10, stderr=4.0)
        for length in (512, 1024)
    ]
    settings = {"metric": "string_match", "best": 100.0, "stderr": 3.1, "cells": cells}
    return result(variant, "ruler/niah_multikey_1", value, 96.0, **settings)


def tracing(variant: VariantEntry) -> TaskResult:
    settings = {"metric": "string_match", "best": 100.0, "stderr": 2.5, "query_aware": False}
    return result(variant, "ruler/vt", 80 * quality(variant), 80.0, **settings)


def fidelity(variant: VariantEntry) -> TaskResult:
    value = 0.5 + 0.5 * quality(variant)
    metrics = [
        MetricEntry(name="agreement", value=value, n=20, stderr=0.01),
        MetricEntry(name="kl", value=1 - quality(variant), n=20, stderr=0.02),
        MetricEntry(name="exact_match", value=None, n=0, stderr=None),
    ]
    return result(variant, "fidelity", value, 1.0, metric="agreement", metrics=metrics, stderr=0.01)


def ppl(variant: VariantEntry, in_blocks: tuple[str, ...] = ()) -> TaskResult:
    """Perplexity, of the policies `in_blocks` fed 128 tokens at a time."""
    positions = [2**power for power in range(11)]
    nll = [2.2 - quality(variant) * 0.1 * math.log2(position) for position in positions]
    if variant.policy == "streaming" and variant.budget == 64:
        nll = [*nll[:7], 4.1, 5.0, 5.6, 5.9]  # collapses past its budget
    curve = CurveEntry(
        name="nll by position", x=positions, y=nll, x_label="position (tokens)", y_label="mean NLL"
    )
    metrics = [
        MetricEntry(name="ppl", value=math.exp(nll[-1]), n=20, stderr=None),
        MetricEntry(
            name="chunk", value=128 if variant.policy in in_blocks else 1, n=20, stderr=None
        ),
    ]
    settings = {"metric": "ppl", "best": None, "lower_is_better": True, "stderr": None}
    settings["metrics"] = metrics
    return result(variant, "ppl", math.exp(nll[-1]), math.exp(1.2), curves=[curve], **settings)


def output_error(variant: VariantEntry) -> TaskResult:
    layers = list(range(LAYERS))
    error = [(1.0 - quality(variant)) * (0.2 + 0.1 * layer) for layer in layers]
    curve = CurveEntry(
        name="error by layer", x=layers, y=error, x_label="layer", y_label="output error"
    )
    settings = {"metric": "error", "best": 0.0, "lower_is_better": True}
    return result(variant, "output-error", sum(error) / LAYERS, 0.0, curves=[curve], **settings)


def speed(variant: VariantEntry) -> TaskResult:
    rate = 40.0 if variant.budget is None else 36 + 512 / int(variant.budget)
    cells = [
        CellEntry(
            at={"length": length, "new_tokens": 16}, value=rate * 640 / length, n=3, stderr=0.5
        )
        for length in (256, 512, 1024)
    ]
    settings = {"metric": "decode_tokens_per_s", "best": None, "stderr": 0.4}
    return result(variant, "speed", rate, 40.0, cells=cells, **settings)


BUILDERS = {
    "niah": niah,
    "ruler/niah_multikey_1": multikey,
    "ruler/vt": tracing,
    "fidelity": fidelity,
    "ppl": ppl,
    "output-error": output_error,
    "speed": speed,
}


def document(
    tasks=tuple(BUILDERS), policies=POLICIES, budgets=BUDGETS, **changes
) -> ResultsDocument:
    """A finished run of every variant on every task."""
    entries = variants(policies, budgets)
    results = [BUILDERS[task](variant) for task in tasks for variant in entries]
    fields = {
        "name": "needle-compare",
        "kvtool": "0.2.0",
        "git_commit": "0123abc",
        "argv": ["kvtool", "eval", "-t", ",".join(tasks), "-b", ",".join(map(str, budgets))],
        "started": "2026-11-20T10:00:00+00:00",
        "finished": "2026-11-20T10:21:30+00:00",
        "complete": True,
        "environment": Environment(
            python="3.11.9",
            os="Linux 6.8 x86_64",
            cpu="AMD EPYC 7R13",
            threads=2,
            gpu=None,
            cuda=None,
            packages={"torch": "2.13.0", "transformers": "5.23.0"},
        ),
        "model": ModelUsed(
            id="kvtool/reference",
            revision=None,
            config_hash="a1b2c3",
            dtype="float32",
            device="cpu",
            attn_implementation="sdpa",
            layers=LAYERS,
            kv_heads=2,
            head_dim=16,
            trained_length=512,
        ),
        "seed": 0,
        "variants": entries,
        "results": results,
        "averages": [
            Average(
                variant=variant.name,
                suite="ruler",
                tasks=["ruler/niah_multikey_1", "ruler/vt"],
                value=88 * quality(variant),
                delta=88 * (quality(variant) - 1),
            )
            for variant in entries
            if {"ruler/niah_multikey_1", "ruler/vt"} <= set(tasks)
        ],
        "gates": [
            GateResult(
                gate="least", variant="roco@64", task="niah", value=0.55, limit=0.9, passed=False
            ),
            GateResult(
                gate="max_drop",
                variant="snapkv@256",
                task="niah",
                value=0.0,
                limit=2.0,
                passed=True,
            ),
        ],
    }
    fields.update(changes)
    return ResultsDocument(**fields)


def changed(run: ResultsDocument, variant: str, **update) -> ResultsDocument:
    """The same run with other results of one variant."""
    results = [r.model_copy(update=update) if r.variant == variant else r for r in run.results]
    return run.model_copy(update={"results": results})


def container(panel, label):
    """Points with their whiskers, by their place in the legend."""
    return next(c for c in panel.containers if c.get_label() == label)


def line(panel, label):
    """A line of a picture, by its place in the legend."""
    return next(x for x in panel.get_lines() if x.get_label() == label)


HOST_BYTES = 2.0**19


def with_host_memory(run: ResultsDocument, variant: str) -> ResultsDocument:
    """The same run, in which a variant has evicted tokens in host memory."""
    more = {"host_bytes": HOST_BYTES}
    results = [
        each.model_copy(update={"cost": each.cost.model_copy(update=more)})
        if each.variant == variant
        else each
        for each in run.results
    ]
    return run.model_copy(update={"results": results})
