"""Draws at random, anew for each text.

A draw follows from seed, layer, position and tokens seen, so texts of one length lose the same
positions. Over many texts that is one draw, and its measurement is not that of drawing. So a part
that draws declares `draws: ClassVar = True` and has a setting `seed`.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from kvtool.policies.policy import Policy

_BITS = 48  # of a seed


def draws(part: object) -> bool:
    """Return whether a part says that it draws at random by its setting `seed`."""
    return bool(getattr(part, "draws", False))


def drawn_for(policy: Policy, text: str) -> Policy:
    """Return the policy with the draws of one text; the same object where it draws nothing.

    Args:
        text: anything that identifies the text.
    """
    score, evicted = policy.score, policy.evicted
    if draws(score):
        policy = replace(policy, score=_with_own_draws(score, text))
    if evicted is not None and draws(evicted):
        policy = replace(policy, evicted=_with_own_draws(evicted, text))
    return policy


def _with_own_draws(part: Any, text: str) -> Any:
    """Return a part that draws with a seed of its own."""
    return replace(part, seed=_mixed(part.seed, text))


def _mixed(seed: int, text: str) -> int:
    digest = hashlib.sha256(f"{seed}:{text}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest, "big") >> (8 * len(digest) - _BITS)
