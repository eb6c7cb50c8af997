"""RocketKV's stages as a plan has them: as they stand, or scaled to a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtool.documents.plan import PlanDocument
from kvtool.maths.allocation import allocate_by_counts

if TYPE_CHECKING:  # a plan needs no torch
    from kvtool.policies.policy import Policy


@dataclass(frozen=True)
class LayerStages:
    """The sizes of stage 2 in one layer."""

    page_size: int
    head_dims: int
    top_k: int


@dataclass(frozen=True)
class PlannedStages:
    """What a plan says of both stages for one prompt.

    Attributes:
        token_budget: pairs of key and value below which everything is read, in the mean of layers.
        kept: tokens of the prompt that stage 1 leaves in each layer whose budget is free.
        page_size, head_dims, top_k: of stage 2, the last in the mean of layers.
        pairs, chosen: `token_budget` and `top_k` of each layer whose budget is free.
    """

    token_budget: int
    kept: list[int]
    page_size: int
    head_dims: int
    top_k: int
    pairs: list[int]
    chosen: list[int]

    def of_layer(self, place: int) -> LayerStages:
        """Return the sizes of the layer at a place among those whose budget is free."""
        return LayerStages(self.page_size, self.head_dims, self.chosen[place])


def goes_by_stages(policy: Policy) -> bool:
    """Say whether a policy's sizes come from RocketKV's stages."""
    return policy.budget_is_traffic and policy.reader is not None and policy.reader.planned


def split_of(policy: Policy) -> float | None:
    """Return the share of the compression that stage 1 takes: 0 without one, None: computed."""
    return getattr(policy.score, "split", None) if policy.two_stages else 0.0


def planned_stages(plan: PlanDocument, policy: Policy, n: int) -> PlannedStages | None:
    """Return RocketKV's stages for a prompt of `n` tokens.

    Of L layers, layer l has C * L * f_l / sum f of stage 1's tokens C, room for the planned new
    ones included, by the fractions f of the layers; none keeps less than the window, and none more
    than all. Without a stage 1 the pairs that a step reads are shared out so. The token counts of a
    plan made from a share are scaled to the prompt.

    Returns:
        None if the policy goes by no stages, or the plan has no such section.
    """
    section, new = plan.rocketkv, plan.target.max_new_tokens
    if section is None or not goes_by_stages(policy):
        return None
    planned = plan.target.prompt_tokens

    def scaled(tokens: int) -> int:
        return tokens if plan.target.ratio is None else max(1, tokens * n // planned)

    context = section.context if plan.target.ratio is None else n + new
    tokens = [plan.layers.tokens[i] for i in plan.free_layers]
    budget, top_k, window = scaled(section.token_budget), scaled(section.top_k), 1
    pairs, chosen = [budget] * len(tokens), [top_k] * len(tokens)
    if policy.two_stages:
        window = policy.score.window
    else:
        pairs, chosen = (shared_out(tokens, mean, 1, context) for mean in (budget, top_k))
    least = min(window + new, context)
    stage1 = max(least, scaled(section.stage1(new) - new) + new)
    return PlannedStages(
        token_budget=budget,
        kept=[count - new for count in shared_out(tokens, stage1, least, context)],
        page_size=section.page_size,
        head_dims=section.head_dims,
        top_k=top_k,
        pairs=pairs,
        chosen=chosen,
    )


def shared_out(tokens: Sequence[int], mean: int, least: int, most: int) -> list[int]:
    """Split a mean over layers in proportion to their tokens."""
    layers = len(tokens)
    limits = [least] * layers, [max(most, least)] * layers
    return allocate_by_counts(tokens, mean * layers, *limits).tokens
