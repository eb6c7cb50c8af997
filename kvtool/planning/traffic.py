"""A budget of what a decoded token reads: what is stored by it, and the sizes of the reader."""

from __future__ import annotations

from kvtool.planning.rocketkv import RocketKVPlan, plan_rocketkv
from kvtool.planning.stages import LayerStages, split_of
from kvtool.policies.parts import Read
from kvtool.policies.policy import Policy
from kvtool.policies.read.view import StepBudget


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
    plan = _stages(policy, pairs, n + new, head_dim=1, new=new, window=window)
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
    if reader is None:
        raise ValueError(f"`{policy}` has no reader")
    stages: LayerStages | RocketKVPlan | None = planned
    if reader.planned and planned is None:
        strict = pairs >= reader.min_budget  # what is generated may exceed the budget
        whole = length <= pairs  # the prompt is stored whole, and so is what is generated
        stages = _stages(
            policy, pairs, length + new, head_dim, new, window=0, strict=strict, whole=whole
        )
    return reader.sized(StepBudget(pairs, max(1, stored), head_dim, stages))


def pairs_of(reader: Read) -> int:
    """Count the pairs that a step of a reader with a `k` of its own amounts to."""
    return (reader.k or 0) * reader.divisor


def _stages(
    policy: Policy,
    pairs: int,
    context: int,
    head_dim: int,
    new: int,
    window: int,
    strict: bool = False,
    whole: bool = False,
) -> RocketKVPlan:
    """Plan both stages of RocketKV; what keeps everything has no stage 1."""
    return plan_rocketkv(
        context,
        pairs,
        head_dim,
        max_new_tokens=new,
        window=window,
        split=0.0 if whole else split_of(policy),
        strict=strict,
    )
