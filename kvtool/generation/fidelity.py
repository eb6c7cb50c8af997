"""Compare a compressed run with the full cache's, both reading the same tokens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvtool.cache.hooks.rope import reading
from kvtool.cache.whole.settings import RopeLengths
from kvtool.generation.broken_numbers import check_logits
from kvtool.transformers_versions import cache_argument


@dataclass(frozen=True)
class Fidelity:
    """How close the compressed run stays to the full cache, both reading the same tokens.

    Attributes:
        agreement: share of steps whose most likely token is the same.
        kl: mean Kullback-Leibler divergence from the full cache's distribution, in nats.
        first_divergence: first step whose most likely token differs, None if none does.
    """

    agreement: float
    kl: float
    first_divergence: int | None


def compare_logits(full: Tensor, logits: Tensor) -> Fidelity:
    """Compare two runs that read the same tokens.

    Args:
        full: (batch, steps, vocab) float32 of the full cache.
        logits: the same of the compressed run.
    """
    same = full.argmax(-1) == logits.argmax(-1)
    reference = full.log_softmax(-1)
    kl = (reference.exp() * (reference - logits.log_softmax(-1))).sum(-1).mean()
    differs = (~same.all(0)).nonzero()
    return Fidelity(
        agreement=same.float().mean().item(),
        kl=max(kl.item(), 0.0),
        first_divergence=int(differs[0]) if len(differs) else None,
    )


def join_fidelities(parts: Sequence[tuple[Fidelity | None, int]]) -> Fidelity | None:
    """Join the measurements of parts of a run, each with its steps; None if one has none."""
    measured = [(part, steps) for part, steps in parts if part is not None]
    if len(measured) < len(parts):
        return None
    total, before, first = sum(steps for _, steps in measured), 0, None
    for part, steps in measured:
        if first is None and part.first_divergence is not None:
            first = before + part.first_divergence
        before += steps
    return Fidelity(
        agreement=sum(part.agreement * steps for part, steps in measured) / total,
        kl=sum(part.kl * steps for part, steps in measured) / total,
        first_divergence=first,
    )


@torch.no_grad()
def compare_with_full(
    model: PreTrainedModel, input_ids: Tensor, logits: Tensor, rope: RopeLengths | None = None
) -> Fidelity:
    """Compare the logits of a compressed run with the full cache's over the same tokens.

    Args:
        input_ids: (batch, n + new).
        logits: (batch, new, vocab) float32 of the compressed run.
        rope: for which lengths that run has chosen its factors, where they depend on the length.
    """
    new = logits.shape[1]
    options = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = new
    with reading(rope):
        full = model(
            input_ids=input_ids[:, :-1],
            use_cache=True,
            **{cache_argument(): DynamicCache(config=model.config)},
            **options,
        ).logits[:, -new:]
    check_logits(model, full, input_ids)
    return compare_logits(full.float().cpu(), logits)
