"""RocketKV's section of a plan: what the two stages need, for a policy and a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvtool.documents.memory import ModelShape
from kvtool.documents.plan import Cost, RocketKVSection, Target
from kvtool.errors import UsageError
from kvtool.model_shape import DTYPE_BYTES, LayerShape
from kvtool.planning.rocketkv import RocketKVPlan, nominal_storage, plan_rocketkv
from kvtool.planning.stages import goes_by_stages, split_of

if TYPE_CHECKING:  # a plan needs no torch
    from kvtool.policies.policy import Policy


def make_section(
    model: ModelShape,
    layers: Sequence[LayerShape],
    target: Target,
    policy: Policy | None,
    budget: int,
) -> tuple[RocketKVSection | None, list[str]]:
    """Return RocketKV's section, or why there is none; a plan for RocketKV itself needs one.

    Args:
        layers: those whose budget is free.
        policy: what will run; None for no policy in particular.
        budget: pairs that a step reads of a layer and KV head.

    Raises:
        UsageError: there can be none, and the policy goes by it.
    """
    try:
        per_head = 2 * model.head_dim * DTYPE_BYTES.get(model.dtype or "", 0)
        if per_head and max(layer.token_bytes for layer in layers) != per_head:
            raise UsageError(f"`{model.id}` does not store keys and values per head")
        plan = plan_for(model, target, policy, budget)
    except UsageError as error:
        if policy is not None and goes_by_stages(policy):
            raise
        return None, [f"note: no plan for rocketkv: {error}"]
    return _section(plan, model.head_dim), []


def plan_for(model: ModelShape, target: Target, policy: Policy | None, budget: int) -> RocketKVPlan:
    """Plan for the policy, where it is RocketKV or has no stage 1, or for RocketKV as it is."""
    given = target.context, budget, model.head_dim
    if policy is None or not goes_by_stages(policy):
        return plan_rocketkv(*given, max_new_tokens=target.max_new_tokens)
    return plan_rocketkv(
        *given,
        max_new_tokens=target.max_new_tokens,
        window=policy.score.window if policy.two_stages else 0,
        split=split_of(policy),
    )


def costs(plan: RocketKVPlan, head_dim: int) -> tuple[Cost, Cost]:
    """Return what the stages store and read, as shares of a full cache."""
    ratio, split = plan.compression_ratio, plan.split_factor
    paper = 1.0 if plan.dense else nominal_storage(ratio, split, doubled=True)
    storage = Cost(exact=plan.storage(), paper=paper)
    return storage, Cost(exact=plan.traffic(head_dim), paper=1 / ratio)


def _section(plan: RocketKVPlan, head_dim: int) -> RocketKVSection:
    storage, traffic = costs(plan, head_dim)
    return RocketKVSection(**asdict(plan), storage=storage, traffic=traffic)
