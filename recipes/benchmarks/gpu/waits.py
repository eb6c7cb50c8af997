"""What else a user waits for: whole prompts, profiles, CaliDrop, eager steps, many prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from rich.table import Table

from kvtool.evaluation.bench.meter import Peak, watched_devices
from kvtool.generation import decode_step
from kvtool.profiling.measure import measure
from kvtool.profiling.request import DEFAULT, Plan
from kvtool.sizes import Budget
from recipes.benchmarks.calidrop import calibrated_lines
from recipes.benchmarks.gpu import speed
from recipes.benchmarks.gpu.results import Case, Record
from recipes.benchmarks.gpu.settings import Settings
from recipes.benchmarks.gpu.speed import budget_of, models, policy_for
from recipes.benchmarks.serving import answer_as_rows_end, make_prompts, sequence_bytes
from recipes.benchmarks.speed import dynamic_prompt, kvtool_prompt, median_ratio, time_steps

TITLE = "whole prompts, profiles, CaliDrop, eager steps, many prompts, beside their baselines"
WHOLE = ("h2o", "roco", "scissorhands", "d2o")
EAGER = ("h2o", "h2o+caote", "roco", "tova", "snapkv")
BASES = ("snapkv", "h2o")
SERVED = ("h2o", "snapkv")
AIMS = {"prompt": 1.6, "profile": 1.5, "calidrop": 1.2, "eager": 1.1}  # at most, as ratios
PEAK = 1.1  # of a prompt's memory, as a ratio


def cases(settings: Settings) -> Iterator[Case]:
    """What each aim needs, the shorter prompts first."""
    for n in (96,) if settings.tiny else (4096, 16384):
        for policy in WHOLE[:1] if settings.tiny else WHOLE:
            yield Case(f"prompt {n} {policy}", partial(whole_prompt, settings, n, policy))
        yield Case(f"profile {n} {' '.join(DEFAULT)}", partial(profile, settings, n))
    n = 96 if settings.tiny else 4096
    for base in BASES[:1] if settings.tiny else BASES:
        yield Case(f"calidrop {n} {base}", partial(calidrop, settings, n, base))
    for policy in SERVED[:1] if settings.tiny else SERVED:
        yield Case(f"serving {policy}", partial(serving, settings, policy))
    for policy in EAGER[:1] if settings.tiny else EAGER:
        yield Case(f"eager {budget_of(settings)} {policy}", partial(eager, settings, policy))


def release() -> None:
    """Let go of the models."""
    speed.release()


def _ids(settings: Settings, model, n: int) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (1, n), device=settings.device)


def _turns(settings: Settings, model, runs: dict[str, Callable[[], object]]) -> Record:
    """Run a baseline and what is set against it in turns: seconds, and growth of memory."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    peaks: dict[str, list[int]] = {name: [] for name in runs}
    for turn in range(2 if settings.tiny else 4):
        for name, run in runs.items():
            settings.wait()
            peak, start = Peak(watched_devices(model)), time.perf_counter()
            run()
            settings.wait()
            if turn:  # the first one sets up what is there only once
                seconds[name].append(time.perf_counter() - start)
                peaks[name].append(peak.growth() or 0)
    grown = {name: max(each) for name, each in peaks.items()}
    return {
        "ms": 1e3 * statistics.median(seconds["ours"]),
        "base_ms": 1e3 * statistics.median(seconds["base"]),
        "ratio": median_ratio(seconds["ours"], seconds["base"]),
        "peak_ratio": grown["ours"] / grown["base"] if grown["base"] else None,
    }


@torch.no_grad()
def whole_prompt(settings: Settings, n: int, policy: str) -> Record:
    """Read a prompt at once, against DynamicCache with sdpa."""
    ours, plain = models(settings.device, settings.tiny)
    ids, budget = _ids(settings, ours, n), 2 * budget_of(settings)
    runs = {
        "base": lambda: dynamic_prompt(plain, ids),
        "ours": lambda: kvtool_prompt(ours, ids, policy, budget, "full"),
    }
    return _turns(settings, ours, runs)


@torch.no_grad()
def profile(settings: Settings, n: int) -> Record:
    """Profile a text without decoding, against a plain forward over it."""
    ours, plain = models(settings.device, settings.tiny)
    ids = _ids(settings, ours, n)
    plan = Plan(tuple(DEFAULT), 0, None)
    runs = {"base": lambda: dynamic_prompt(plain, ids), "ours": lambda: measure(ours, [ids], plan)}
    return _turns(settings, ours, runs)


@torch.no_grad()
def calidrop(settings: Settings, n: int, base: str) -> Record:
    """Decode with calibration, anew at every eighth step, against the base without it."""
    ours = models(settings.device, settings.tiny)[0]
    ids = _ids(settings, ours, n)
    base, count = policy_for(base, settings), 1 if settings.tiny else 4
    (line,) = calibrated_lines(ours, base, budget_of(settings), ids, count, ("every 8th",))
    return {"ms": line.ms, "base_ms": line.base_ms, "ratio": line.ratio}


@torch.no_grad()
def eager(settings: Settings, policy: str) -> Record:
    """Decode at the budget, against DynamicCache with sdpa that holds as many tokens."""
    ours, plain = models(settings.device, settings.tiny)
    budget, count = budget_of(settings), speed.steps_of(settings)
    ids = _ids(settings, ours, 4 * budget)
    token = torch.tensor([7], device=settings.device)
    short = dynamic_prompt(plain, ids[:, : budget - count // 2])
    cache = kvtool_prompt(ours, ids, policy_for(policy, settings), budget, "full")
    steps = [
        lambda: decode_step(ours, cache, token),
        lambda: plain(token[None], past_key_values=short),
    ]
    mine, theirs = time_steps(steps, count, 4, settings.wait)
    return {
        "ms": statistics.median(mine),
        "base_ms": statistics.median(theirs),
        "ratio": median_ratio(mine, theirs),
    }


@torch.no_grad()
def serving(settings: Settings, policy: str) -> Record:
    """Answer many prompts at a quarter of their tokens, in the memory of a few full rows.

    The baseline is the full cache in as much memory, whose rows end and join likewise.
    """
    ours = models(settings.device, settings.tiny)[0]
    count, longest, new = (4, 96, 8) if settings.tiny else (24, 8192, 128)
    prompts = make_prompts(ours, count, longest, new)
    prompts = [replace(each, ids=each.ids.to(settings.device)) for each in prompts]
    memory = (1 if settings.tiny else 4) * sequence_bytes(ours, "full", None, longest, new)
    variants = (("full", None), (policy_for(policy, settings), Budget.parse("25%")))
    ends, ours.generation_config.eos_token_id = ours.generation_config.eos_token_id, None
    try:
        base, own = (answer_as_rows_end(ours, *variant, prompts, memory) for variant in variants)
    finally:
        ours.generation_config.eos_token_id = ends
    return {
        "ms": 1e3 * own.seconds / own.tokens,
        "base_ms": 1e3 * base.seconds / base.tokens,
        "ratio": own.seconds / base.seconds,
        "rows": own.rows,
        "base_rows": base.rows,
        "decoding_ratio": base.decoding_speed / own.decoding_speed,
    }


# ---- table


def table(records: dict[str, Record], machine: Record) -> list[Table]:
    """Show each ratio beside its aim."""
    shown = Table(title="ratios of times, baselines in the same run", show_edge=False)
    shown.add_column("what")
    for name in ("ms", "baseline ms", "ratio", "aim", "peak, ratio", "rows in flight"):
        shown.add_column(name, justify="right")
    for key, record in records.items():
        if "ratio" not in record:
            continue
        aim, peak = AIMS.get(key.split(" ")[0]), record.get("peak_ratio")
        shown.add_row(
            key,
            f"{record['ms']:.2f}",
            f"{record['base_ms']:.2f}",
            f"{record['ratio']:.2f}",
            "" if aim is None else f"{aim:.2f}",
            "" if peak is None else f"{peak:.2f}",
            f"{record['rows']} / {record['base_rows']}" if "rows" in record else "",
        )
    shown.caption = f"ms of serving: of a new token; aims: peaks at most {PEAK}"
    return [shown] if shown.row_count else []
