"""Steps of several policies in turns, with the cuts between them: what a token costs of each."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

import kvtool
from kvtool.generation import decode_step, prefill
from kvtool.generation.feeding import wait

_WARM = 4


@dataclass(frozen=True)
class TurnLine:
    """A policy's steps beside those of the first policy.

    Attributes:
        ms: mean of a step.
        ratio: mean over the mean of the first policy.
        paired: median of the ratios of steps that ran side by side.
    """

    policy: str
    first: str
    budget: int
    steps: int
    ms: float
    ratio: float
    paired: float


def turn_lines(
    model: PreTrainedModel, args: argparse.Namespace, note: Callable[[str], None]
) -> Iterator[TurnLine]:
    """Decode with every policy in turns, each beginning a round as often as the others."""
    note(f"{', '.join(args.policies)}: {args.turns} steps in turns")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, 2 * args.budget), generator=generator)
    ids, token = ids.to(model.device), torch.tensor([7], device=model.device)
    caches = [kvtool.build_cache(model, policy, args.budget) for policy in args.policies]
    for cache in caches:
        prefill(model, cache, ids)
    seconds: list[list[float]] = [[] for _ in caches]
    gc.collect()
    gc.disable()
    try:
        for turn in range(_WARM + args.turns):
            for place in range(len(caches)):
                i = (place + turn) % len(caches)
                start = time.perf_counter()
                decode_step(model, caches[i], token)
                wait(model)
                if turn >= _WARM:
                    seconds[i].append(time.perf_counter() - start)
    finally:
        gc.enable()
    first = seconds[0]
    for policy, own in zip(args.policies, seconds, strict=True):
        pairs = [a / b for a, b in zip(own, first, strict=True)]
        yield TurnLine(
            policy=policy,
            first=args.policies[0],
            budget=args.budget,
            steps=args.turns,
            ms=1e3 * statistics.fmean(own),
            ratio=sum(own) / sum(first),
            paired=statistics.median(pairs),
        )
