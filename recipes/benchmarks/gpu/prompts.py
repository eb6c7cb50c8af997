"""Prompts of an 8B shape in blocks and at once, and profiles, beside plain forwards."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from rich.table import Table
from transformers import PreTrainedModel

from kvtool.evaluation.bench.meter import Peak, watched_devices
from kvtool.profiling.measure import measure
from kvtool.profiling.request import DEFAULT, Plan
from recipes.benchmarks.gpu import decode
from recipes.benchmarks.gpu.results import Case, Record
from recipes.benchmarks.gpu.settings import Settings
from recipes.benchmarks.speed import dynamic_prompt, kvtool_prompt, median_ratio

TITLE = "prompts of an 8B shape, random weights, bfloat16, beside DynamicCache with sdpa"
POLICIES = ("snapkv", "h2o")
BLOCKS = ("block:2048", "block:128")
SHORT = 16384  # tokens; longer prompts are read once, after a short one


def cases(settings: Settings) -> Iterator[Case]:
    """Blocks, whole prompts under h2o, and a profile."""
    n = decode.long(settings)
    blocks = ("block:16",) if settings.tiny else BLOCKS
    for mode, policy in product(blocks, POLICIES[1:] if settings.tiny else POLICIES):
        yield prompt_case(settings, n, policy, mode)
    for length in (n,) if settings.tiny else (4096, 16384):
        yield prompt_case(settings, length, "h2o", "full")
    length = n if settings.tiny else 4096
    yield Case(f"profile {length}", partial(profile, settings, length), seconds=6)


def prompt_case(settings: Settings, n: int, policy: str, mode: str) -> Case:
    """Time a prompt in turns with the plain one."""
    key = f"prompt {n} {policy}" + ("" if mode == "full" else f" {mode}")
    return Case(key, partial(prompt, settings, n, policy, mode), seconds=3 + n / 8192)


@torch.no_grad()
def prompt(settings: Settings, n: int, policy: str, mode: str) -> Record:
    """Time a prompt at twice the budget of decoding, against DynamicCache with sdpa."""
    ours, plain = decode.models(settings.device, settings.tiny)
    decode.settle()
    decode.rows_that_fit(settings, 1, 1.2 * n * decode.token_bytes(ours))
    policy, budget = decode.policy_for(policy, settings), 2 * decode.budget_of(settings)
    return in_turns(settings, n, lambda ids: kvtool_prompt(ours, ids, policy, budget, mode), plain)


@torch.no_grad()
def profile(settings: Settings, n: int) -> Record:
    """Profile a text without decoding, against a plain forward over it."""
    ours, plain = decode.models(settings.device, settings.tiny)
    plan = Plan(tuple(DEFAULT), 0, None)
    return in_turns(settings, n, lambda ids: measure(ours, [ids], plan), plain)


def in_turns(
    settings: Settings, n: int, ours: Callable[[torch.Tensor], object], plain: PreTrainedModel
) -> Record:
    """Run a text's plain forward and what is set against it: seconds, and growth of memory."""
    ids = torch.randint(0, plain.config.vocab_size, (1, n), device=plain.device)
    runs = {"base": lambda ids: dynamic_prompt(plain, ids), "ours": ours}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    grown: dict[str, int] = {}
    turns = 1 if settings.tiny or n > SHORT else 3
    for turn in range(1 + turns):
        text = ids if turn or n <= SHORT else ids[:, : n // 8]
        for name, run in runs.items():
            gc.collect()
            settings.wait()
            peak, start = Peak(watched_devices(plain)), time.perf_counter()
            run(text)
            settings.wait()
            if turn:  # the first one sets up what is there only once
                seconds[name].append(time.perf_counter() - start)
                grown[name] = max(grown.get(name, 0), peak.growth() or 0)
    return {
        "ms": 1e3 * statistics.median(seconds["ours"]),
        "base_ms": 1e3 * statistics.median(seconds["base"]),
        "ratio": median_ratio(seconds["ours"], seconds["base"]),
        "peak_mib": grown["ours"] / 2**20,
        "peak_ratio": grown["ours"] / grown["base"] if grown["base"] else None,
    }


def table(records: dict[str, Record], machine: Record) -> list[Table]:
    """Show what is timed in turns with its baseline."""
    shown = Table(title="baselines in the same run", show_edge=False)
    shown.add_column("what")
    for name in ("ms", "baseline ms", "ratio", "peak MiB", "ratio", "rows in flight"):
        shown.add_column(name, justify="right")
    for key, record in records.items():
        if "ratio" not in record:
            continue
        mib, peak = record.get("peak_mib"), record.get("peak_ratio")
        shown.add_row(
            key,
            f"{record['ms']:.2f}",
            f"{record['base_ms']:.2f}",
            f"{record['ratio']:.2f}",
            "" if mib is None else f"{mib:.0f}",
            "" if peak is None else f"{peak:.2f}",
            f"{record['rows']} / {record['base_rows']}" if "rows" in record else "",
        )
    shown.caption = "ms of serving: of a new token"
    return [shown] if shown.row_count else []
