"""Policies whose KV heads have budgets that are known before any text is read."""

from __future__ import annotations

from dataclasses import replace

from kvtool.errors import UsageError
from kvtool.policies.allocate.head_split import HeadSplit
from kvtool.policies.policy import Policy

_HINT = "--allocator optimal plans layers alone"


def with_fixed_heads(policy: Policy, split: HeadSplit, hint: str = _HINT) -> Policy:
    """Return a policy each of whose KV heads has a budget of its own.

    Args:
        hint: what works without one.

    Raises:
        UsageError: a policy that keeps equal counts in all heads, or splits its budget by itself.
    """
    if policy.budget_is_traffic or policy.reader is not None:
        raise UsageError(
            f"policy `{policy}` reads as many tokens in every KV head, so heads have no budgets of "
            "their own",
            hint=hint,
        )
    if policy.head_split is not None:
        raise UsageError(
            f"policy `{policy}` splits its budget over the KV heads by itself", hint=hint
        )
    try:
        return replace(policy, heads=split)
    except UsageError as error:
        raise UsageError(
            f"the KV heads of policy `{policy}` have no budgets of their own: {error.message}",
            hint=hint,
        ) from None
