"""RocketKV's stages as a plan has them: as they stand, or scaled to a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.documents.plan import PlanDocument
from kvtool.maths.allocation import allocate_by_counts


@dataclass(frozen=True)
class PlannedStages:
    """What a plan says of both stages for one prompt.

    Attributes:
        token_budget: pairs of key and value below which everything is read.
        kept: tokens of the prompt that stage 1 leaves in each layer whose budget is free.
        page_size, head_dims, top_k: of stage 2.
    """

    token_budget: int
    kept: list[int]
    page_size: int
    head_dims: int
    top_k: int


def planned_stages(plan: PlanDocument, n: int, window: int) -> PlannedStages | None:
    """Return RocketKV's stages for a prompt of `n` tokens; None if the plan has no such section.

    Of L layers, layer l has C * L * f_l / sum f of stage 1's tokens C, room for the planned new
    ones included, by the fractions f of the layers; none keeps less than the window, and none more
    than all. The token counts of a plan made from a share are scaled to the prompt.
    """
    section, new = plan.rocketkv, plan.target.max_new_tokens
    if section is None:
        return None
    planned = plan.target.prompt_tokens

    def scaled(tokens: int) -> int:
        return tokens if plan.target.ratio is None else max(1, tokens * n // planned)

    context = section.context if plan.target.ratio is None else n + new
    least = min(window + new, context)
    stage1 = max(least, scaled(section.stage1(new) - new) + new)
    tokens = [plan.layers.tokens[i] for i in plan.free_layers]
    layers = len(tokens)
    split = allocate_by_counts(tokens, stage1 * layers, [least] * layers, [context] * layers)
    return PlannedStages(
        token_budget=scaled(section.token_budget),
        kept=[count - new for count in split.tokens],
        page_size=section.page_size,
        head_dims=section.head_dims,
        top_k=scaled(section.top_k),
    )
