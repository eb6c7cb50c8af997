"""A prompt read into a compressed cache, in blocks or at once, against DynamicCache with sdpa."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from recipes.benchmarks.speed import (
    dynamic_prompt,
    kvtool_prompt,
    median_ratio,
    run_prompt,
    stored_mib,
)


@dataclass(frozen=True)
class PrefillLine:
    """A policy beside DynamicCache in the same run; ratios are to it, MiB are of each.

    Attributes:
        block: tokens that are read at a time; None: all.
        peak_mib, full_peak_mib: most memory of the run above what was there before it: resident
            on a CPU, allocated on a GPU.
    """

    policy: str
    budget: int
    block: int | None
    length: int
    full_s: float
    seconds: float
    ratio: float
    full_kv_mib: float
    kv_mib: float
    kv_ratio: float
    full_peak_mib: float
    peak_mib: float


def prefill_lines(ours, plain, args, note) -> Iterator[PrefillLine]:
    """Every policy on a long prompt in blocks."""
    return _lines(ours, plain, args, note, args.prefill_policies, args.prefill_length, args.block)


def whole_lines(ours, plain, args, note) -> Iterator[PrefillLine]:
    """Policies that sum attention, on prompts that are read at once."""
    for length in args.whole_lengths:
        yield from _lines(ours, plain, args, note, args.whole_policies, length, None)


def _lines(ours, plain, args, note, policies, length, block) -> Iterator[PrefillLine]:
    """Every policy, after all turns; the first run of each is a short one, and not counted."""
    budget = args.prefill_budget
    mode = "full" if block is None else f"block:{block}"
    short = budget + 2 * (block or 128)
    ids = torch.randint(0, ours.config.vocab_size, (1, length), device=ours.device)
    runs = {"DynamicCache": (plain, lambda ids: dynamic_prompt(plain, ids))}
    for policy in policies:
        runs[policy] = (
            ours,
            lambda ids, policy=policy: kvtool_prompt(ours, ids, policy, budget, mode),
        )
    seconds = {name: [] for name in runs}
    peaks, stored = {}, {}
    for turn in range(args.repeats):
        for name, (model, run) in runs.items():
            note(f"{length} tokens, turn {turn + 1}: {name}")
            if turn == 0:
                run(ids[:, :short])
            taken, peak, cache = run_prompt(lambda: run(ids), model)  # noqa: B023
            seconds[name].append(taken)
            peaks[name] = max(peak, peaks.get(name, 0))
            stored[name] = stored_mib(cache) if model is plain else cache.report().kv_bytes / 2**20
            del cache
    full_s = statistics.median(seconds["DynamicCache"])
    for policy in policies:
        yield PrefillLine(
            policy=policy,
            budget=budget,
            block=block,
            length=length,
            full_s=full_s,
            seconds=statistics.median(seconds[policy]),
            ratio=median_ratio(seconds[policy], seconds["DynamicCache"]),
            full_kv_mib=stored["DynamicCache"],
            kv_mib=stored[policy],
            kv_ratio=stored[policy] / stored["DynamicCache"],
            full_peak_mib=peaks["DynamicCache"],
            peak_mib=peaks[policy],
        )
