"""Random: evicted slots drawn uniformly, the baseline that any score must beat.

Used as a baseline by RoCo (Ren and Zhu, 2024, https://arxiv.org/abs/2402.06262).

Differences from EasyKV, which drops one contiguous run of tokens from a random start: the draws
here are independent. Instead of a generator's state, each draw is a hash of (seed, layer, tokens
seen, position). A batch entry then draws what it would draw alone, a saved cache goes on with the
same draws, and a CPU and a GPU agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtool.lazy_torch import Tensor, torch
from kvtool.policies.parts import AttentionRows, SlotView, State
from kvtool.policies.scores.shared import KeepsEnds
from kvtool.policies.spelling import limited


def uniform_draws(positions: Tensor, stream: Tensor) -> Tensor:
    """Draw numbers in [0, 1), one per position and stream (the finaliser of SplitMix64).

    Args:
        positions: (batch, kv_heads, slots) integers.
        stream: int64, broadcastable to `positions`; selects the draw.

    Returns:
        float32 of the broadcast shape, multiples of 2**-24.
    """
    mixed = positions.to(torch.int64) * -7046029254386353131 + stream * 2685821657736338717
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ _unsigned_shift(mixed, shift)) * factor
    mixed = mixed ^ _unsigned_shift(mixed, 31)
    return _unsigned_shift(mixed, 40).float() * 2.0**-24


def seed_offset(seed: int) -> int:
    """Return what a seed adds to every stream: of 64 bits, in which neighbours lie far apart.

    >>> seed_offset(3) == 3 << 40, abs(seed_offset(2**63 - 1)) < 2**63
    (True, True)
    """
    high, low = divmod(seed, 2**23)
    return (low << 40) ^ (high * 0x9E3779B97F4A7C15 & 2**62 - 1)


def _unsigned_shift(number: Tensor, bits: int) -> Tensor:
    return (number >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True)
class Random(KeepsEnds):
    """Evict at random (seeded).

    Args:
        per_head: draw for each KV head; by default all heads of a layer lose the same tokens.
        seed: selects the draws.
        prompt: keep all of the prompt, and draw among what is generated: the control that a policy
            for reasoning must beat (https://arxiv.org/abs/2609.03430).
    """

    per_head: bool = False
    seed: int = limited(0, "0 or more")
    prompt: bool = False

    name: ClassVar = "random"
    paper: ClassVar = "https://arxiv.org/abs/2402.06262"
    draws: ClassVar = True

    @property
    def keeps_prompt(self) -> bool:
        return self.prompt

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        stream = torch.as_tensor(view.tokens_seen, device=view.positions.device)
        stream = stream * 1_000_003 + view.layer + seed_offset(self.seed)
        if self.per_head:
            held = view.positions.shape[1]
            heads = torch.arange(held, device=view.positions.device) + view.heads.first(held)
            stream = stream + (heads[:, None] << 50)
        return uniform_draws(view.positions, stream)
