"""Facts about layers for a split of a budget, from a profile and published curves."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvtool.documents.files import expand, read_bytes
from kvtool.errors import UsageError
from kvtool.policies.allocate.optimal import LossForecast, Optimal
from kvtool.policies.allocate.problem import NOT_MEASURED, LossCurves
from kvtool.policies.allocate.table import spell_allocator
from kvtool.policies.parts import Allocator

if TYPE_CHECKING:
    from kvtool.documents.profile import AnswerLosses, ProfileDocument
    from kvtool.policies.policy import Policy


def evidence(
    allocator: Allocator,
    profile: ProfileDocument | None,
    free: Sequence[int],
    scale: Fraction,
    shares: Sequence[float] | None = None,
    policy: Policy | None = None,
) -> dict[str, Any]:
    """Return the fields of an `AllocationProblem` that an allocator needs, or a forecast.

    Args:
        free: the layers to split over.
        scale: length of the prompts to plan for over that of the prompts profiled; measured budgets
            grow with it.
        shares: of published budget curves, for each layer of `free`.
        policy: to plan for; losses of another one are not used.

    Raises:
        UsageError: no profile, or one that lacks the measurement for some layer; losses of another
            policy, or of one sample only.
    """
    metric = allocator.metric
    losses = None if profile is None else profile.metrics.answer_loss
    found: dict[str, Any] = {}
    if losses is not None and metric == "answer_loss":
        _check_policy(losses, policy, allocator)
        found["curves"] = _curves(losses, free, scale)
        if by_heads(allocator):
            found["head_curves"] = _head_curves(losses, free, scale, allocator)
    elif losses is not None and policy is not None and losses.policy == str(policy):
        several = len(losses.by_sample) > 1
        found["curves"] = _curves(losses, free, scale) if several else NOT_MEASURED
    if metric is None:
        return found
    if metric == "curves":
        if shares is None:
            raise UsageError(f"allocator `{allocator.name}` needs --curves FILE")
        return found | {"shares": shares}
    make = f"kvtool profile --metrics {allocator.measurement}"
    measured = None if profile is None else getattr(profile.metrics, metric)
    if profile is None or profile.data is None or measured is None:
        lacks = "" if profile is None else ", and this one lacks it"
        raise UsageError(
            f"allocator `{allocator.name}` needs a profile with `{metric}`{lacks}",
            hint=f"{make} | kvtool plan-budget - .., or --allocator uniform",
        )
    if metric == "answer_loss":
        return found
    variance = _of(measured, free, metric)
    return found | {"variance": variance, "largest": [profile.data.tokens - 1] * len(variance)}


def default_allocator(profile: ProfileDocument | None, policy: Policy | None) -> str:
    """Return the allocator of a plan whose settings name none.

    It is `optimal` where the profile holds the answer's losses under the policy to plan for, `d2o`
    with any other profile, and `uniform` without one.
    """
    if profile is None:
        return "uniform"
    losses = profile.metrics.answer_loss
    measured = losses is not None and (policy is None or losses.policy == str(policy))
    return "optimal" if measured else "d2o"


def _of(values: Sequence[Any], free: Sequence[int], metric: str) -> list[Any]:
    missing = [layer for layer in free if values[layer] is None]
    if missing:
        raise UsageError(f"the profile has no `{metric}` for layer {missing[0]}")
    return [values[layer] for layer in free]


def by_heads(allocator: Allocator) -> bool:
    """Return whether an allocator splits over KV heads by what was measured of them."""
    return isinstance(allocator, Optimal) and allocator.heads


def _curves(losses: AnswerLosses, free: Sequence[int], scale: Fraction) -> LossCurves:
    """Return the curves of the layers to split over."""
    count = len(losses.by_sample)
    if count < 2:
        raise UsageError(
            f"the profile's `answer_loss` is of {count} sample, and how sure it is takes 2 or more",
            hint="kvtool profile --metrics answer_loss --samples 8",
        )
    rows = [_of(sample, free, "answer_loss") for sample in losses.by_sample]
    return _in_order(losses.budgets, rows, scale)


def _head_curves(
    losses: AnswerLosses, free: Sequence[int], scale: Fraction, allocator: Allocator
) -> list[LossCurves]:
    """Return the curves of the KV heads of each layer to split over."""
    if losses.heads is None:
        raise UsageError(
            f"allocator `{spell_allocator(allocator)}` needs losses of KV heads, which the profile "
            "lacks",
            hint=f"kvtool profile --metrics {allocator.measurement} -p "
            f"{shlex.quote(losses.policy)}, or --allocator {allocator.name}",
        )
    samples = [_of(sample, free, "answer_loss.heads") for sample in losses.heads.by_sample]
    by_layer = zip(*samples, strict=True)
    return [_in_order(losses.budgets, rows, scale) for rows in by_layer]


def _in_order(
    budgets: Sequence[int], rows: Sequence[Sequence[Sequence[float]]], scale: Fraction
) -> LossCurves:
    """Order the points of samples x layers or heads by budget; of equal ones, the first stays."""
    places = {max(1, int(budget * scale)): i for i, budget in reversed(list(enumerate(budgets)))}
    order = sorted(places)
    return LossCurves(
        order, [[[curve[places[budget]] for budget in order] for curve in row] for row in rows]
    )


def length_scale(profile: ProfileDocument | None, prompt_tokens: int) -> Fraction:
    """Return how much longer the prompts to plan for are than those of the profile."""
    if profile is None or profile.data is None:
        return Fraction(1)
    return Fraction(prompt_tokens, profile.data.tokens)


def _check_policy(losses: AnswerLosses, policy: Policy | None, allocator: Allocator) -> None:
    """Refuse losses that were measured of another policy than the one to plan for."""
    if policy is not None and losses.policy != str(policy):
        raise UsageError(
            f"the profile's `answer_loss` is of policy `{losses.policy}`, and the plan for "
            f"`{policy}`",
            hint=f"kvtool profile --metrics {allocator.measurement} -p {shlex.quote(str(policy))}",
        )


def loss_note(losses: LossForecast, allocator: Allocator) -> str:
    """Say what an answer is expected to lose."""
    if losses.planned == losses.equal and losses.standard_error == 0:
        kept = "" if allocator.metric != "answer_loss" else ": no other split gains beyond noise"
        return f"predicted loss: {losses.equal:.3g} nats per token with equal budgets{kept}"
    text = (
        f"predicted loss: {losses.planned:.3g} nats per token, {losses.equal:.3g} with equal "
        f"budgets (standard error of the difference: {losses.standard_error:.2g})"
    )
    if allocator.metric != "answer_loss":
        return text
    what = "KV heads" if by_heads(allocator) else "layers"
    return f"{text}; it adds up {what} cut one by one, so compare the plan with equal budgets"


@dataclass(frozen=True)
class BudgetCurves:
    """Budget curves out of a file.

    Attributes:
        ratios: mean shares of the prompt, ascending.
        shares: for each ratio the share of each layer, the mean over its KV heads.
        by_head: whether the file has shares of KV heads.
    """

    ratios: Sequence[float]
    shares: Sequence[Sequence[float]]
    by_head: bool

    def at(self, ratio: float) -> list[float]:
        """Return the shares of the layers for a ratio, on the lines between those of the file.

        Below the smallest ratio of the file, and above the largest, its shares grow in proportion.
        """
        if not self.ratios[0] < ratio < self.ratios[-1]:
            place = 0 if ratio <= self.ratios[0] else -1
            return [share * ratio / self.ratios[place] for share in self.shares[place]]
        rows = zip(pairwise(self.ratios), pairwise(self.shares), strict=True)
        (low, high), (before, after) = next(row for row in rows if ratio <= row[0][1])
        part = (ratio - low) / (high - low)
        return [a + part * (b - a) for a, b in zip(before, after, strict=True)]


def read_curves(path: str, layers: int, kv_heads: int) -> BudgetCurves:
    """Read budget curves: a JSON object of ratios, each with a share or a list of shares per layer.

    Args:
        path: of the file.
        layers, kv_heads: of the model.

    Raises:
        UsageError: no such file, something that is no share, or another number of layers or heads.
    """
    where = f"`{path}`"
    from kvtool.documents.profile import BUDGET_CURVES
    from kvtool.documents.source import reason

    try:
        data = read_bytes(expand(path), where, kind="file of budget curves")
    except OSError:
        raise UsageError(f"cannot read budget curves from {where}") from None
    try:
        rows = BUDGET_CURVES.validate_json(data)
    except ValueError as error:
        message = f"{where} holds no budget curves: {reason(error)}"
        raise UsageError(message, hint='{"0.2": [0.1, 0.3], ..}') from None
    for at, row in rows.items():
        if len(row) != layers:
            raise UsageError(f"{where} has {len(row)} layers at {at:g}, and the model {layers}")
        for i, own in enumerate(row):
            if len(own) not in (1, kv_heads):
                raise UsageError(
                    f"{where}: layer {i} at {at:g} has {len(own)} KV heads, and the model "
                    f"{kv_heads}"
                )
    ratios = sorted(rows)
    shares = [[math.fsum(own) / len(own) for own in rows[at]] for at in ratios]
    by_head = any(len(own) > 1 for row in rows.values() for own in row)
    return BudgetCurves(ratios, shares, by_head)
