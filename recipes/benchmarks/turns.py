"""Steps of several policies in turns, with the cuts between them: what a token costs of each.

`turn_lines` lets the eager steps of all policies take turns, `beside_lines` the eager and compiled
steps of each policy and those of the first one.
"""

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
from recipes.benchmarks.decoding import WARM, PolicySteps
from recipes.benchmarks.speed import median_ratio, time_steps

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


@dataclass(frozen=True)
class BesideLine:
    """Eager and compiled steps of a policy beside those of the first policy, in turns.

    Attributes:
        eager_ms, compiled_ms: mean of a step, the cuts between included.
        eager_ratio, compiled_ratio: mean over the mean of the first policy's steps of that kind.
        eager_paired, compiled_paired: median of the ratios of steps that ran side by side.
        graphs: that the policy's steps were compiled to; none where the first one's fit.
        left_eager: of the compiled steps, those that ran eager since shapes or slots changed.
    """

    policy: str
    first: str
    budget: int
    steps: int
    eager_ms: float
    eager_ratio: float
    eager_paired: float
    compiled_ms: float
    compiled_ratio: float
    compiled_paired: float
    graphs: int
    left_eager: int


def beside_lines(
    model: PreTrainedModel, args: argparse.Namespace, note: Callable[[str], None]
) -> Iterator[BesideLine]:
    """Decode with every policy and the first one in turns; what fails is noted and left out.

    The compiler begins anew with every policy, since a policy's graphs have guards that the next
    would have to fail first.
    """
    first = args.policies[0]
    for policy in args.policies:
        torch._dynamo.reset()
        note(f"{policy}: {args.turns} eager and compiled steps in turns with {first}")
        try:
            yield _beside(model, policy, first, args)
        except Exception as error:  # one of many must not cost the others their numbers
            note(f"left out: {type(error).__name__}: {error}")


def _beside(
    model: PreTrainedModel, policy: str, first: str, args: argparse.Namespace
) -> BesideLine:
    room = args.turns + WARM
    both = [PolicySteps(model, each, args.budget, room, args.backend) for each in (first, policy)]
    for each in both:
        each.refill()
    base, own = both
    steps = [base.eager, own.eager, base.compiled, own.compiled]
    times = time_steps(steps, args.turns, WARM, lambda: wait(model))
    report = own.report()
    return BesideLine(
        policy=policy,
        first=first,
        budget=args.budget,
        steps=args.turns,
        eager_ms=statistics.fmean(times[1]),
        eager_ratio=sum(times[1]) / sum(times[0]),
        eager_paired=median_ratio(times[1], times[0]),
        compiled_ms=statistics.fmean(times[3]),
        compiled_ratio=sum(times[3]) / sum(times[2]),
        compiled_paired=median_ratio(times[3], times[2]),
        graphs=report.graphs,
        left_eager=report.eager_steps,
    )
