"""RocketKV: from a token budget to everything that its two stages need.

Behnam et al., 2025, https://arxiv.org/abs/2502.14051, section 3. A token budget t is what one
decode step may read per KV head, in pairs of key and value. Half of it estimates which pages
matter, from keys alone, half attends. With C tokens left by stage 1, pages of P tokens and k1 of D
channels read, C / P * k1 = t * D, hence k1 = D * P / c2 with c2 = C / t.

As the authors' accuracy code, where it goes beyond the paper: generated tokens are reserved, and a
page size above c2, for which k1 would exceed D, becomes 1. Unlike theirs, a context that fits into
the budget is attended in full (`strict` follows them).

The stages of a plan are used unchanged or scaled to a prompt. A budget of what a decoded token
reads gives both what is stored and the sizes of the reader.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.documents.plan import PlanDocument, compression_ratio, stage1_tokens
from kvtool.errors import UsageError
from kvtool.maths.allocation import allocate_by_counts
from kvtool.policies.parts import Read
from kvtool.policies.policy import Policy
from kvtool.policies.read.view import StepBudget

_LEAST_BUDGET = 16
_SPLIT_AT_1, _SPLIT_PER_DOUBLING, _SPLIT_MOST = 0.2, 0.06, 0.8


@dataclass(frozen=True)
class RocketKVPlan:
    """The two stages of RocketKV for one length of context.

    Attributes:
        context: S, tokens of the prompt and those generated.
        token_budget: t, pairs of key and value read per decode step.
        dense: everything fits into the budget, and nothing is selected or dropped.
        compression_ratio: c = S / t.
        split_factor: r, the share of log c that stage 1 takes.
        stage1_tokens: C, tokens that stage 1 leaves, the generated ones included.
        prompt_tokens: tokens of the prompt that stage 1 keeps.
        page_size: P.
        head_dims: k1, channels of a key that stage 2 reads to estimate.
        top_k: k2, tokens that stage 2 attends to.
    """

    context: int
    token_budget: int
    dense: bool
    compression_ratio: float
    split_factor: float
    stage1_tokens: int
    prompt_tokens: int
    page_size: int
    head_dims: int
    top_k: int

    @property
    def pages(self) -> int:
        """Pages of the tokens that stage 1 leaves, the last one perhaps not full."""
        return -(-self.stage1_tokens // self.page_size)

    def storage(self) -> float:
        """Return what is stored as a share of a full cache: tokens, and a pair of keys per page."""
        if self.dense:
            return 1.0
        return (self.stage1_tokens + self.pages) / self.context

    def traffic(self, head_dim: int) -> float:
        """Return what a decode step reads as a share of a full cache.

        Of every page one key in `head_dims` channels, half a pair each, and `top_k` pairs.
        """
        if self.dense:
            return 1.0
        estimation = self.pages * self.head_dims / (2 * head_dim)
        return (estimation + self.top_k) / self.context


def split_factor(compression_ratio: float) -> float:
    """Return r, the share of the compression that stage 1 takes.

    >>> round(split_factor(64), 6), split_factor(2**20)
    (0.56, 0.8)
    """
    growth = _SPLIT_PER_DOUBLING * math.log2(compression_ratio)
    return min(_SPLIT_AT_1 + growth, _SPLIT_MOST)


def page_size(stage2_ratio: float) -> int:
    """Return P for stage 2's compression ratio c2: its root rounded up, 1 where that is above c2.

    >>> page_size(6.2324), page_size(1.3633), page_size(1.0)
    (3, 1, 1)
    """
    size = math.ceil(math.sqrt(stage2_ratio))
    return size if size <= stage2_ratio else 1


def plan_rocketkv(
    context: int,
    token_budget: int,
    head_dim: int,
    *,
    max_new_tokens: int = 0,
    window: int = 32,
    split: float | None = None,
    strict: bool = False,
) -> RocketKVPlan:
    """Plan both stages.

    Args:
        context: S, tokens of the prompt and those generated.
        token_budget: t.
        head_dim: D.
        max_new_tokens: tokens of S that will be generated.
        window: newest prompt tokens that stage 1 always keeps.
        split: the split factor r; None computes it from the compression ratio.
        strict: select even where everything fits into the budget, as the authors' code does.

    Raises:
        UsageError: a budget of fewer than 16 tokens, or one that leaves the prompt no more than
            its window.
    """
    if context <= token_budget and not strict:
        return RocketKVPlan(
            context=context,
            token_budget=token_budget,
            dense=True,
            compression_ratio=1.0,
            split_factor=split_factor(1.0),
            stage1_tokens=context,
            prompt_tokens=context - max_new_tokens,
            page_size=1,
            head_dims=head_dim,
            top_k=context,
        )
    if token_budget < _LEAST_BUDGET:
        raise UsageError(
            f"rocketkv needs a budget of {_LEAST_BUDGET} tokens or more, got {token_budget}"
        )
    ratio = compression_ratio(context, token_budget)
    split = split_factor(ratio) if split is None else split
    stage1 = stage1_tokens(context, token_budget, split, max_new_tokens)
    if stage1 - max_new_tokens < window:
        raise UsageError(
            f"rocketkv with {token_budget} of {context} tokens keeps {stage1 - max_new_tokens} "
            f"tokens of the prompt, fewer than its window of {window}",
            hint="a larger budget, or fewer new tokens",
        )
    stage2_ratio = max(1.0, stage1 / token_budget)
    size = page_size(stage2_ratio)
    return RocketKVPlan(
        context=context,
        token_budget=token_budget,
        dense=False,
        compression_ratio=ratio,
        split_factor=split,
        stage1_tokens=stage1,
        prompt_tokens=stage1 - max_new_tokens,
        page_size=size,
        head_dims=min(head_dim, max(1, int(head_dim * size / stage2_ratio))),
        top_k=token_budget // 2,
    )


def nominal_storage(
    compression_ratio: float, split: float, *, keeps_all: bool = False, doubled: bool = False
) -> float:
    """Return the stored share of a full cache by the real-valued formula.

    The paper's table 1 (`doubled`) weighs the page tensors against the keys alone, though a page of
    P tokens holds one pair of vectors for P pairs of key and value.

    >>> round(nominal_storage(64, 0.56), 6), round(nominal_storage(64, 0.56, doubled=True), 6)
    (0.136406, 0.175416)

    Args:
        keeps_all: RocketKV-MT, which selects anew in each turn and drops nothing.
        doubled: as the paper prints it.
    """
    kept = 1.0 if keeps_all else compression_ratio**-split
    pages = compression_ratio ** (-(1 + split) / 2)
    return kept + (2 if doubled else 1) * pages


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

    Stage 1's tokens C, the planned new ones included, are split by the fractions f of the layers.
    Of L layers, layer l has C * L * f_l / sum f. None keeps less than the window, and none more
    than all. Without a stage 1 the pairs that a step reads are shared out so. The token counts of a
    plan made from a share are scaled to the prompt.

    Returns:
        None if the policy uses no stages, or the plan has no such section.
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


def tokens_left(policy: Policy, pairs: int, n: int, new: int) -> int:
    """Return what a policy whose budget is traffic leaves of a prompt; all, without a stage 1.

    A prompt of no more tokens than the pairs that a step reads is kept whole.

    Args:
        pairs: of key and value that a decoded token reads per layer and KV head.
        n: tokens of the prompt.
        new: tokens that will be generated, as far as is known.

    Raises:
        UsageError: a budget too small for RocketKV's plan.
    """
    if not policy.two_stages:
        return n
    window = 0 if n <= pairs else policy.score.window
    split = split_of(policy)
    plan = plan_rocketkv(n + new, pairs, 1, max_new_tokens=new, window=window, split=split)
    return n if n <= pairs else min(n, plan.prompt_tokens)


def sized_reader(
    policy: Policy,
    pairs: int,
    length: int,
    stored: int,
    head_dim: int,
    new: int,
    planned: LayerStages | None = None,
) -> Read:
    """Return the reader of a policy with all its sizes.

    Args:
        pairs: as above, or what the reader's own `k` amounts to.
        length: tokens of the prompt, or what is stored of it if the budget is what is stored.
        stored: tokens that are stored when the prompt ends; 0 of padding alone, sized as one.
        head_dim: channels of a key.
        planned: the layer's stages, as a plan has them.
    """
    reader = policy.reader
    assert reader is not None, "the policy reads part of what it stores"
    stages: LayerStages | RocketKVPlan | None = planned
    if reader.planned and planned is None:
        stages = plan_rocketkv(
            length + new,
            pairs,
            head_dim,
            max_new_tokens=new,
            window=0,
            split=0.0 if length <= pairs else split_of(policy),  # stored whole: without a stage 1
            strict=pairs >= reader.min_budget,  # what is generated may exceed the budget
        )
    return reader.sized(StepBudget(pairs, max(1, stored), head_dim, stages))


def pairs_of(reader: Read) -> int:
    """Count the pairs that a step of a reader with a `k` of its own amounts to."""
    return (reader.k or 0) * reader.divisor
