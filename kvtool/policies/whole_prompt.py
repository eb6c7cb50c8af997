"""Policies that read a prompt at once, whatever is asked for: they cut it at its end only."""

from __future__ import annotations

from kvtool.errors import UsageError
from kvtool.policies.policy import Policy


def reads_whole(policy: Policy, *, planned: bool) -> bool:
    """Tell whether a prompt is read at once even where blocks are asked for.

    Args:
        planned: whether a plan says how the budget is split.
    """
    if policy.repetition is not None or policy.score.layer_tokens == "nested":
        return True
    allocator, split = policy.allocator, policy.head_split
    measures = allocator is not None and allocator.metric is not None
    return not planned and (measures or (split is not None and split.whole_prompt))


def check_blocks(policy: Policy, block: int | None) -> None:
    """Refuse blocks where the whole prompt has to be in the cache before any of it goes.

    Args:
        block: tokens that are asked for; None: all at once.

    Raises:
        UsageError: blocks for a policy whose prompt is repeated.
    """
    if block is not None and policy.repetition is not None:
        raise UsageError(
            f"`{policy.score.name}` cuts a prompt once it is whole in the cache and has been "
            "repeated, so it cannot be read in blocks",
            hint="--prefill full",
        )
