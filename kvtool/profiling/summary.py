"""Summarise numbers per head in the sections of a profile: means, and curves at a few points."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvtool.documents.profile import (
    AnswerLosses,
    CosineCurve,
    Curves,
    HeadLosses,
    Jaccard,
    MemoryTable,
    Metrics,
    OutputErrors,
    RecomputeGrid,
    RecomputePoint,
    RobustnessCurve,
    UnionCurve,
)
from kvtool.profiling.calidrop import GRID, replays_prompt
from kvtool.profiling.key_basis import leading_share
from kvtool.profiling.query_centres import concentration
from kvtool.profiling.request import Plan
from kvtool.profiling.roco import RATES, SCORES
from kvtool.profiling.topk_union import TOP_K

_DIGITS = 6  # significant ones; float32 has 7


def summarise(
    found: dict[str, Tensor],
    plan: Plan,
    memory: MemoryTable | None = None,
    losses: Tensor | None = None,
    head_losses: Tensor | None = None,
) -> tuple[Metrics, Curves | None]:
    """Return the metrics and curves of a document.

    Args:
        found: as `measure` returns it.
        memory: goes in as it is.
        losses: (samples, layers, budgets) of `answer_loss`; None: not measured.
        head_losses: (samples, layers, kv_heads, budgets) of the same; None: not measured.
    """
    wanted = set(plan.metrics)
    metrics: dict[str, Any] = {"memory": memory}
    curves: dict[str, Any] = {}
    for name in ("f_variance", "entropy"):
        if name in wanted:
            metrics[name] = _layers(found[name])
    if "query_cosine" in wanted:
        cosine = found["query_cosine"]
        metrics["query_cosine"] = _layers(cosine[..., 0])
        distances = _some(cosine.shape[-1])
        curves["query_cosine"] = CosineCurve(distances=distances, values=_at(cosine, distances))
    if "recompute_frequency" in wanted:
        shares = found["recompute_frequency"]
        metrics["recompute_frequency"] = _layers(shares[:, :, 0, 0])
        curves["recompute_frequency"] = _grid(shares, plan)
    if "topk_union" in wanted:
        union = found["topk_union"]
        metrics["topk_union"] = _layers(union[..., -1])
        steps = _some(plan.steps)
        curves["topk_union"] = UnionCurve(k=TOP_K, steps=steps, values=_at(union, steps))
    if "jaccard" in wanted:
        overlap = {score: _rows(found[f"jaccard_{score}"]) for score in SCORES}
        metrics["jaccard"] = Jaccard(rates=list(RATES), **overlap)
    if "robustness" in wanted:
        metrics["robustness"] = _layers(found["robustness"])
        # few tokens live for longer than half the text
        steps = _some(max(1, found["robustness_curve"].shape[-1] // 2))
        values = _at(found["robustness_curve"], steps)
        curves["robustness"] = RobustnessCurve(steps=steps, values=values)
    if "key_basis" in wanted:
        metrics["key_basis"] = _layers(leading_share(found["key_variance"]))
    if "query_centres" in wanted:
        metrics["query_centres"] = _layers(concentration(found))
    if "output_error" in wanted:
        metrics["output_error"] = OutputErrors(
            policy=str(plan.policy), budgets=list(plan.budgets), errors=_rows(found["output_error"])
        )
    if losses is not None:
        metrics["answer_loss"] = _losses(losses, head_losses, plan)
    return Metrics(**metrics), Curves(**curves) if curves else None


def _losses(losses: Tensor, by_head: Tensor | None, plan: Plan) -> AnswerLosses:
    """Return means and standard errors over samples, and the samples."""
    samples = losses[:, :, None]  # the heads of a layer are cut together
    heads = None
    if by_head is not None:
        heads = HeadLosses(
            losses=_by_head(by_head.mean(0)),
            standard_errors=_by_head(_standard_error(by_head)),
            by_sample=[_by_head(sample) for sample in by_head],
        )
    return AnswerLosses(
        policy=str(plan.policy),
        budgets=list(plan.budgets),
        losses=_rows(samples.mean(0)),
        standard_errors=_rows(_standard_error(samples)),
        by_sample=[_rows(sample) for sample in samples],
        heads=heads,
    )


def _standard_error(samples: Tensor) -> Tensor:
    return samples.std(0) / len(samples) ** 0.5


def _by_head(values: Tensor) -> list[list[list[float]] | None]:
    """Return each layer's (heads, points), without heads of NaN; None where all are."""
    layers = [
        [[_digits(value) for value in row] for row in layer if all(v == v for v in row)]
        for layer in values.tolist()
    ]
    return [layer or None for layer in layers]


def _grid(shares: Tensor, plan: Plan) -> RecomputeGrid:
    mean = shares.nanmean((0, 1)).tolist()
    points = [
        RecomputePoint(
            theta1=theta1,
            theta2=theta2,
            recompute=_digits(recompute),
            calibrate=_digits(calibrate),
            idle=_digits(1 - calibrate),
        )
        for (theta1, theta2), (recompute, calibrate) in zip(GRID, mean, strict=True)
    ]
    return RecomputeGrid(queries="prompt" if replays_prompt(plan.steps) else "decode", grid=points)


def _layers(values: Tensor) -> list[float | None]:
    """Return the mean over heads of each layer, None for NaN."""
    return [_round(value) for value in values.reshape(len(values), -1).mean(1).tolist()]


def _rows(values: Tensor) -> list[list[float] | None]:
    """Return the mean over heads of each layer's (heads, points), None for NaN."""
    if values.dim() < 3 or values.isnan().all():
        return [None] * len(values)
    means = values.mean(1).tolist()
    return [None if any(v != v for v in row) else [_digits(v) for v in row] for row in means]


def _at(values: Tensor, places: list[int]) -> list[list[float] | None]:
    """Return `_rows` at some places, counted from 1."""
    return _rows(values[..., [place - 1 for place in places]] if values.dim() == 3 else values)


def _some(last: int) -> list[int]:
    """Return powers of two up to a number, and the number."""
    powers = [2**i for i in range(last.bit_length()) if 2**i <= last]
    return powers if powers[-1] == last else [*powers, last]


def _round(value: float) -> float | None:
    return None if value != value else _digits(value)


def _digits(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
