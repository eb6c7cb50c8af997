"""How the numbers of RocketKV's plan follow from each other (Behnam et al., 2025, section 3)."""

from __future__ import annotations


def compression_ratio(context: int, token_budget: int) -> float:
    """Return c = S / t, at least 1."""
    return max(1.0, context / token_budget)


def stage1_tokens(context: int, token_budget: int, split_factor: float, max_new_tokens: int) -> int:
    """Return C, the tokens that stage 1 leaves, room for generated ones included: S / c^r.

    >>> stage1_tokens(32768, 512, 0.56, 128)
    3191
    """
    ratio = compression_ratio(context, token_budget)
    return max(int(context / ratio**split_factor), min(2 * max_new_tokens, context))
