"""Policies that are given an allocator from outside, as `--allocator` does."""

from __future__ import annotations

from dataclasses import replace

from kvtool.errors import UsageError
from kvtool.policies.allocate.head_split import HeadSplit
from kvtool.policies.allocate.table import parse_allocator
from kvtool.policies.policy import Policy


def with_allocator(policy: Policy, allocator: str, typed: str | None = None) -> Policy:
    """Put an allocator on a policy.

    Args:
        typed: the policy as it was typed, for errors.

    Raises:
        UsageError: no such allocator; the policy has one already, or cannot carry one.
    """
    chosen = parse_allocator(allocator)
    given = policy.heads if isinstance(chosen, HeadSplit) else policy.allocate
    if given is not None:
        raise UsageError(
            f"policy `{typed or policy}` has the allocator `{given.modifier}` already",
            hint=f"leave out --allocator {allocator}",
        )
    if isinstance(chosen, HeadSplit):
        return replace(policy, heads=chosen)
    return replace(policy, allocate=chosen)
