"""What a profile says about the layers whose budget is free, in the form that allocators read."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from kvtool.documents.profile import ProfileDocument
from kvtool.errors import UsageError
from kvtool.policies.allocate.problem import ErrorCurves
from kvtool.policies.parts import Allocator


def evidence(
    allocator: Allocator, profile: ProfileDocument | None, free: Sequence[int], scale: Fraction
) -> dict[str, Any]:
    """Return the fields of an `AllocationProblem` that an allocator needs from a profile.

    Args:
        free: the layers to split over.
        scale: length of the prompts to plan for over that of the prompts profiled; measured budgets
            grow with it.

    Raises:
        UsageError: no profile, or one that lacks the measurement for some layer.
    """
    metric = allocator.metric
    if metric is None:
        return {}
    make = f"kvtool profile --metrics {metric}"
    if profile is None:
        raise UsageError(
            f"allocator `{allocator.name}` needs a profile with `{metric}`",
            hint=f"{make} | kvtool plan-budget - ..",
        )
    measured = getattr(profile.metrics, metric)
    if measured is None or profile.data is None:
        raise UsageError(
            f"allocator `{allocator.name}` needs `{metric}`, which the profile lacks",
            hint=f"{make}, or --allocator uniform",
        )
    if metric == "output_error":
        return {"curves": _curves(measured.budgets, _of(measured.errors, free, metric), scale)}
    variance = _of(measured, free, metric)
    return {"variance": variance, "largest": [profile.data.tokens - 1] * len(variance)}


def _of(values: Sequence[Any], free: Sequence[int], metric: str) -> list[Any]:
    missing = [layer for layer in free if values[layer] is None]
    if missing:
        raise UsageError(f"the profile has no `{metric}` for layer {missing[0]}")
    return [values[layer] for layer in free]


def _curves(
    budgets: Sequence[int], errors: Sequence[Sequence[float]], scale: Fraction
) -> ErrorCurves:
    """Order the points by budget; of two that scale to the same, the first stays."""
    places = {max(1, int(budget * scale)): i for i, budget in reversed(list(enumerate(budgets)))}
    order = sorted(places)
    return ErrorCurves(order, [[curve[places[budget]] for budget in order] for curve in errors])


def length_scale(profile: ProfileDocument | None, prompt_tokens: int) -> Fraction:
    """Return how much longer the prompts to plan for are than those of the profile."""
    if profile is None or profile.data is None:
        return Fraction(1)
    return Fraction(prompt_tokens, profile.data.tokens)
