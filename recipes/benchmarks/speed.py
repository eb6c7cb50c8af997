"""Prefill, decode and memory against DynamicCache with sdpa, on a random 42M-parameter Llama.

    python -m recipes.benchmarks.speed                                     # about 30 min, 2 cores
    python -m recipes.benchmarks.speed --lengths 4096 --both-prefills h2o  # prefill full, too

Lengths are 1K, 4K, 16K and, with five policies and one prompt each, 32K tokens; prompts are read in
blocks of 128. Decode steps of a policy and of two baselines (DynamicCache that holds the prompt,
and one that holds only `budget` tokens) take turns, so that a change of the machine's speed meets
all three; the ratios are medians of pairs. Memory is the growth of the process's peak resident size
over a prompt, above what it was with the weights loaded; K/V bytes come from the tensors.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

import kvtool
from kvtool.evaluation.bench.meter import Peak, watched_devices
from kvtool.generation import decode_step, prefill
from kvtool.generation.feeding import wait
from recipes.benchmarks.models import build_models

POLICIES = (
    "full",
    "random",
    "recency",
    "streaming",
    "scissorhands",
    "h2o",
    "h2o+caote",
    "h2o+fastcaote",
    "tova",
    "tova+caote",
    "roco",
    "roco+caote",
    "snapkv",
    "snapkv+caote",
)
LONG_POLICIES = ("full", "streaming", "h2o", "h2o+caote", "snapkv")
LONG = 32768


@dataclass(frozen=True)
class Line:
    """One measurement; the ratios are against DynamicCache + sdpa in the same run."""

    length: int
    budget: int | None
    policy: str
    prefill: str
    prefill_s: float
    prefill_ratio: float
    peak_mib: float
    peak_ratio: float
    kv_mib: float
    decode_ms: float
    decode_ratio_full: float
    decode_ratio_budget: float | None


def resident_mib(peak: bool) -> float:
    """Resident size of this process now, or its peak since `reset_peak` (Linux)."""
    name = "VmHWM:" if peak else "VmRSS:"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise RuntimeError("this benchmark reads /proc/self/status, which only Linux has")


def reset_peak() -> float:
    """Give free memory back, start a new peak, and return the resident size."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident_mib(peak=False)


def run_prompt(run, model, repeats: int = 1):
    """Median seconds and largest growth of the peak over some runs, and the last run's cache."""
    seconds, peaks, cache = [], [], None
    for _ in range(repeats):
        cache = None
        gc.collect()
        peak = Peak(watched_devices(model))
        wait(model)
        start = time.perf_counter()
        cache = run()
        wait(model)
        seconds.append(time.perf_counter() - start)
        peaks.append(peak.growth() / 2**20)
    return statistics.median(seconds), max(peaks), cache


def dynamic_prompt(model, ids):
    """A full cache after the prompt."""
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


def stored_mib(cache: DynamicCache) -> float:
    """MiB of all keys and values."""
    return sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values)) / 2**20


def kvtool_prompt(model, ids, policy: str, budget: int | None, block: str):
    """A compressed cache after the prompt."""
    cache = kvtool.build_cache(model, policy, budget, prefill=block)
    prefill(model, cache, ids)
    return cache


def time_steps(steps, count: int, warm: int, synchronize=lambda: None) -> list[list[float]]:
    """Milliseconds of each step function, called in turn; none leaves work to the next's time."""
    times: list[list[float]] = [[] for _ in steps]
    for i in range(warm + count):
        for step, taken in zip(steps, times, strict=True):
            synchronize()
            start = time.perf_counter()
            step()
            synchronize()
            if i >= warm:
                taken.append((time.perf_counter() - start) * 1e3)
    return times


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def measure(length: int, budgets: list[int], args: argparse.Namespace, note) -> list[Line]:
    """Every policy at one length."""
    ours, plain = args.models
    ids = torch.randint(0, ours.config.vocab_size, (1, length))
    token = torch.tensor([7])
    repeats = 1 if length >= LONG else min(args.repeats, 2) if length >= 16384 else args.repeats
    note(f"{length} tokens: DynamicCache")
    base_s, base_peak, full = run_prompt(lambda: dynamic_prompt(plain, ids), plain, repeats)
    base_kv = stored_mib(full)
    base_step = lambda: plain(token[None], past_key_values=full)  # noqa: E731
    base_ms = statistics.median(time_steps([base_step], args.steps, 4)[0])
    lines = [
        Line(
            length, None, "DynamicCache", "full", base_s, 1, base_peak, 1, base_kv, base_ms, 1, None
        )
    ]
    policies = args.policies or (LONG_POLICIES if length >= LONG else POLICIES)
    for policy in policies:
        for budget in budgets:
            if policy == "full" and budget != budgets[0]:
                continue
            kept = None if policy == "full" else budget
            for block in ("full", "block") if policy in args.both_prefills else ("block",):
                note(f"{length} tokens: {policy} at {kept or 'no budget'}, prefill {block}")
                run = lambda: kvtool_prompt(ours, ids, policy, kept, block)  # noqa: B023, E731
                prompt_s, peak, cache = run_prompt(run, ours, repeats)
                kv = cache.report().kv_bytes / 2**20
                short = dynamic_prompt(plain, ids[:, : budget - args.steps // 2])
                our_step = lambda: decode_step(ours, cache, token)  # noqa: B023, E731
                short_step = lambda: plain(token[None], past_key_values=short)  # noqa: B023, E731
                mine, at_budget, at_length = time_steps(
                    [our_step, short_step, base_step], args.steps, 4
                )
                lines.append(
                    Line(
                        length,
                        kept,
                        policy,
                        block,
                        prompt_s,
                        prompt_s / base_s,
                        peak,
                        peak / base_peak,
                        kv,
                        statistics.median(mine),
                        median_ratio(mine, at_length),
                        median_ratio(mine, at_budget) if kept else None,
                    )
                )
    return lines


def show(lines: list[Line]) -> None:
    """Print the table: ratios first, since they are what holds on another machine."""
    table = Table(title="ratios against DynamicCache + sdpa in the same run (below 1 is better)")
    for name in (
        "tokens",
        "policy",
        "budget",
        "prefill",
        "prefill s",
        "ratio",
        "peak MiB",
        "ratio ",
        "K/V MiB",
        "decode ms",
        "vs full",
        "vs full of budget",
    ):
        table.add_column(name, justify="left" if name in ("policy", "prefill") else "right")
    previous = None
    for line in lines:
        if previous not in (None, line.length):
            table.add_section()
        previous = line.length
        at_budget = line.decode_ratio_budget
        table.add_row(
            f"{line.length}",
            line.policy,
            f"{line.budget or '-'}",
            line.prefill,
            f"{line.prefill_s:.2f}",
            f"{line.prefill_ratio:.2f}",
            f"{line.peak_mib:.0f}",
            f"{line.peak_ratio:.2f}",
            f"{line.kv_mib:.1f}",
            f"{line.decode_ms:.1f}",
            f"{line.decode_ratio_full:.2f}",
            "-" if at_budget is None else f"{at_budget:.2f}",
        )
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, LONG])
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--policies", nargs="+", help="default: all; five of them at 32768 tokens")
    parser.add_argument("--both-prefills", nargs="*", default=[])
    parser.add_argument("--repeats", type=int, default=3, help="prompts; 2 at 16K, 1 at 32K")
    parser.add_argument("--steps", type=int, default=32, help="decoded tokens")
    parser.add_argument("--json", type=Path, help="also write the lines here")
    args = parser.parse_args()
    args.models = build_models()
    parameters = sum(p.numel() for p in args.models[0].parameters()) / 1e6
    print(
        f"random Llama of {parameters:.0f}M parameters, float32, "
        f"{torch.get_num_threads()} threads, "
        f"{platform.machine()}, torch {torch.__version__}",
        file=sys.stderr,
    )
    lines: list[Line] = []
    with torch.inference_mode():
        for length in args.lengths:
            budgets = [budget for budget in args.budgets if budget < length]
            lines += measure(length, budgets, args, lambda text: print(text, file=sys.stderr))
            if args.json:
                args.json.write_text(json.dumps([asdict(line) for line in lines], indent=1))
    show(lines)


if __name__ == "__main__":
    main()
