"""Decisions of decoded tokens whether to calibrate: noted step by step, counted some at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtool.cache.storage.host import Chunk
from kvtool.policies.numbers import State

Decision = tuple[Tensor | None, Tensor]
"""Who could decide, bool (batch, heads), None: all; and (2, batch, heads) who recomputes and who is
calibrated."""


@dataclass(frozen=True)
class DecodePlan:
    """What a step has decided about its heads.

    Attributes:
        query: (batch, heads, 1, head_dim).
        recompute, calibrate: bool (batch, heads); None: all.
        fetched: what is stored of the heads that recompute, on its way; None: none does.
        changes: whether any head is calibrated.
    """

    query: Tensor
    recompute: Tensor | None
    calibrate: Tensor | None
    fetched: Iterator[Chunk] | None
    changes: bool


def add_decisions(memory: State, noted: Sequence[Decision]) -> State:
    """Add decisions to the counts.

    Args:
        memory: `steps`, `recomputed` and `calibrated` among others, (batch, heads) float32.
        noted: one or more.

    Returns:
        The three counts.
    """
    knowing = [known for known, _ in noted if known is not None]
    steps = memory["steps"] + (len(noted) - len(knowing))
    if knowing:
        steps = steps + torch.stack(knowing).sum(0)
    recomputed, calibrated = torch.stack([decided for _, decided in noted]).sum(0)
    return {
        "steps": steps,
        "recomputed": memory["recomputed"] + recomputed,
        "calibrated": memory["calibrated"] + calibrated,
    }
