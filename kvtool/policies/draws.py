"""Policies that draw, each text with draws of its own.

A draw follows from seed, layer, position and tokens seen, so that texts of one length lose the same
positions: over many texts that is one draw, and what is measured of it is not what drawing does.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtool.policies.evicted.cam import CaM
from kvtool.policies.scores.random import Random

if TYPE_CHECKING:
    from kvtool.policies.policy import Policy

_BITS = 48  # of a seed


def drawn_for(policy: Policy, text: str) -> Policy:
    """Return the policy with the draws of one text; the same object where it draws nothing.

    Args:
        text: anything that tells the text from others.
    """
    if isinstance(policy.score, Random):
        score = replace(policy.score, seed=_mixed(policy.score.seed, text))
        policy = replace(policy, score=score)
    if isinstance(policy.evicted, CaM) and not policy.evicted.deterministic:
        evicted = replace(policy.evicted, seed=_mixed(policy.evicted.seed, text))
        policy = replace(policy, evicted=evicted)
    return policy


def _mixed(seed: int, text: str) -> int:
    digest = hashlib.sha256(f"{seed}:{text}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest, "big") >> (8 * len(digest) - _BITS)
