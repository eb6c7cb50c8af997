"""Decoded tokens and prompts of an 8B shape: how much of the possible gain each policy reaches."""

from __future__ import annotations

import functools
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from rich.table import Table
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from kvtool.cache.features.calidrop import Calibration
from kvtool.errors import KvtoolError
from kvtool.evaluation.bench.meter import Peak, watched_devices
from kvtool.generation import decode_step
from recipes.benchmarks.decoding import (
    WARM,
    FullCacheSteps,
    PolicySteps,
    copy_bandwidth,
    weight_bytes,
)
from recipes.benchmarks.gpu.results import Case, Record, Skip, Wrong
from recipes.benchmarks.gpu.settings import Settings
from recipes.benchmarks.models import build_models, with_weights_of
from recipes.benchmarks.reading import filled, random_slots
from recipes.benchmarks.speed import dynamic_prompt, kvtool_prompt, stored_mib

TITLE = "an 8B shape, random weights, bfloat16"
FULL = ("unmasked", "flash_attention_2", "sdpa")
EVICTORS = ("h2o", "h2o+caote", "roco", "snapkv", "tova", "d2o")
READERS = ("rocketkv", "quest", "hsa")
OFFLOADING = ("snapkv+calidrop",)
MOST = ("h2o", "snapkv", "quest")  # also measured in batches
AIMS = (
    "aims on an H200: full caches at most 4.0 / 4.8 / 7.0 ms at 8K / 32K / 100K, evictors at most "
    "3.8 ms, 85 % of what is possible (readers 70 %) for one row, 4x at 16 x 32K, 6x at 8 x 100K"
)
SPARE = 3 * 2**30  # bytes of a GPU that are left to activations and graphs


def contexts(settings: Settings) -> list[tuple[int, int]]:
    """Rows and tokens of each."""
    if settings.tiny:
        return [(1, 96), (2, 96)]
    return [(1, 8192), (1, 32768), (1, 102400), (8, 32768), (16, 32768), (8, 102400)]


def budget_of(settings: Settings) -> int:
    """Tokens kept or read."""
    return 16 if settings.tiny else 512


def steps_of(settings: Settings) -> int:
    """Timed steps."""
    return 3 if settings.tiny else 40


@functools.cache
def models(device: str, tiny: bool) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the same weights with kvtool's attention and with sdpa."""
    shape, dtype = ("tiny", torch.float32) if tiny else ("8b", torch.bfloat16)
    return build_models(shape, device, dtype)


def cases(settings: Settings) -> Iterator[Case]:
    """What the aims need first, of each kind something; then all the rest."""
    seen = set()
    for case in (*_first(settings), *_all(settings)):
        if case.key not in seen:
            seen.add(case.key)
            yield case


def _first(settings: Settings) -> Iterator[Case]:
    alone = [place for place in contexts(settings) if place[0] == 1]
    together = [place for place in contexts(settings) if place[0] > 1]
    usual = alone[len(alone) // 2]
    yield Case("copy", partial(copy, settings))
    yield _full(settings, *usual, FULL[0])
    yield _evictor(settings, 1, "h2o")
    yield from (_reader(settings, *usual, policy) for policy in _readers(settings))
    yield from _prompts(settings, _lengths(settings)[0])
    for rows, n in together[:2]:
        yield _full(settings, rows, n, FULL[0])
        yield _evictor(settings, rows, "h2o")
    yield from (_full(settings, *place, FULL[0]) for place in alone)


def _all(settings: Settings) -> Iterator[Case]:
    evictors = ("h2o",) if settings.tiny else EVICTORS
    for alone in (True, False):
        places = [(rows, n) for rows, n in contexts(settings) if (rows == 1) == alone]
        yield from (_full(settings, *place, FULL[0]) for place in places)
        for rows in dict.fromkeys(rows for rows, _ in places):
            for policy in evictors if alone else [p for p in evictors if p in MOST]:
                yield _evictor(settings, rows, policy)
        for (rows, n), policy in product(places, _readers(settings)):
            if alone or policy in MOST:
                yield _reader(settings, rows, n, policy)
        if alone:
            for (rows, n), policy in product(places, OFFLOADING):
                key = f"decode {rows} x {n} {policy}"
                yield Case(key, partial(offloading_steps, settings, n, policy))
    for n in _lengths(settings):
        yield from _prompts(settings, n)
    if not settings.tiny:
        places = contexts(settings)
        yield from (_full(settings, *place, FULL[1]) for place in places)
        yield _full(settings, *places[0], FULL[2])


def _full(settings: Settings, rows: int, n: int, kernel: str) -> Case:
    return Case(
        f"decode {rows} x {n} full, {kernel}", partial(full_steps, settings, rows, n, kernel)
    )


def _evictor(settings: Settings, rows: int, policy: str) -> Case:
    return Case(f"decode {rows} x any {policy}", partial(evictor_steps, settings, rows, policy))


def _reader(settings: Settings, rows: int, n: int, policy: str) -> Case:
    return Case(f"decode {rows} x {n} {policy}", partial(reader_steps, settings, rows, n, policy))


def _readers(settings: Settings) -> tuple[str, ...]:
    return ("quest",) if settings.tiny else READERS


def _lengths(settings: Settings) -> tuple[int, ...]:
    return (96,) if settings.tiny else (32768, 102400)


def _prompts(settings: Settings, n: int) -> Iterator[Case]:
    yield Case(f"prompt {n} full", partial(prompt, settings, n, None, "full"))
    blocks = "block" if settings.tiny else "block:2048"  # of 128 tokens, launching takes longer
    for policy, mode in product(("snapkv", "h2o"), (blocks, "full")):
        key = f"prompt {n} {policy} {mode}"
        yield Case(key, partial(prompt, settings, n, policy_for(policy, settings), mode))


def policy_for(policy: str, settings: Settings) -> str:
    """Shorten SnapKV's window where the budget is smaller than it."""
    if settings.tiny and policy.startswith("snapkv"):
        return policy.replace("snapkv", "snapkv(window=4)", 1)
    return policy


def copy(settings: Settings) -> Record:
    """Measure the bandwidth of a large copy, and what a token reads of the weights."""
    plain = models(settings.device, settings.tiny)[1]
    return {"bytes_per_s": copy_bandwidth(plain), "weight_bytes": weight_bytes(plain)}


def _settle() -> None:
    """Give graphs and caches of the case before back."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _check_room(settings: Settings, needed: int) -> None:
    """Skip a case whose cache does not fit.

    Raises:
        Skip: it needs more than the GPU has free.
    """
    _settle()
    if settings.cuda:
        free = torch.cuda.mem_get_info(settings.device)[0] - SPARE
        if needed > free:
            raise Skip(f"needs {needed / 2**30:.0f} GiB of K/V, and {free / 2**30:.0f} are free")


def _token_bytes(model: PreTrainedModel) -> int:
    config = model.config
    return (
        2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * config.head_dim
        * (model.dtype.itemsize)
    )


def _time(settings: Settings, step: Callable[[], object]) -> tuple[float, float]:
    """Return the median milliseconds of a step, and the seconds of those that made graphs."""
    start = time.perf_counter()
    for _ in range(WARM):
        step()
    settings.wait()
    warm, taken = time.perf_counter() - start, []
    for _ in range(steps_of(settings)):
        settings.wait()
        start = time.perf_counter()
        step()
        settings.wait()
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken), warm


def _backend(settings: Settings) -> str:
    return "eager" if settings.tiny else "inductor"


def _room(settings: Settings) -> int:
    return steps_of(settings) + WARM + 2


@torch.no_grad()
def full_steps(settings: Settings, rows: int, n: int, kernel: str) -> Record:
    """Time compiled steps over a full cache of random keys and values.

    Raises:
        Skip: it does not fit, or there is no flash-attn.
        Wrong: they did not run as CUDA graphs.
    """
    plain = models(settings.device, settings.tiny)[1]
    if kernel == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise Skip("flash-attn is not installed")
    _check_room(settings, rows * n * _token_bytes(plain))
    model = with_weights_of(plain)
    model.set_attn_implementation(kernel)
    full = FullCacheSteps(model, n, _room(settings), _backend(settings), rows)
    skipped = counters["inductor"]["cudagraph_skips"]
    ms, warm = _time(settings, full)
    found = {"ms": ms, "read_bytes": full.read_bytes(), "first_s": warm}
    return _check_graphs(settings, found, counters["inductor"]["cudagraph_skips"] == skipped)


@torch.no_grad()
def evictor_steps(settings: Settings, rows: int, policy: str) -> Record:
    """Time eager and compiled steps of a policy that holds its budget, after a real prompt.

    Raises:
        Skip: it does not fit.
        Wrong: it cannot be compiled; eager steps are reported. Or timed steps ran eagerly.
    """
    ours, budget = models(settings.device, settings.tiny)[0], budget_of(settings)
    _check_room(settings, rows * 4 * budget * _token_bytes(ours))
    steps = PolicySteps(ours, policy, budget, _room(settings), _backend(settings), rows)
    steps.refill()
    eager, _ = _time(settings, steps.eager)
    found = {"ms": eager, "eager_ms": eager, "read_bytes": steps.read_bytes()}
    try:
        ms, warm = _time(settings, steps.compiled)
    except KvtoolError as error:
        raise Wrong(f"runs eagerly only: {error}", found) from error
    report = steps.report()
    found |= {"ms": ms, "first_s": warm, "graphs": report.graphs}
    if report.eager_steps > WARM - 4:  # a step compiles, one is recorded, and one repeats it
        raise Wrong(f"{report.eager_steps} steps did not run compiled", found)
    return _check_graphs(settings, found, report.cuda_graphs)


def _check_graphs(settings: Settings, found: Record, recorded: bool) -> Record:
    if settings.cuda and not recorded:
        raise Wrong("no CUDA graphs were recorded", found)
    return found


@torch.no_grad()
def reader_steps(settings: Settings, rows: int, n: int, policy: str) -> Record:
    """Time steps of a policy that reads a part of what it stores, random keys and values."""
    ours = models(settings.device, settings.tiny)[0]
    _check_room(settings, int(1.4 * rows * n * _token_bytes(ours)))  # buffers grow by a quarter
    cache = filled(ours, policy, budget_of(settings), random_slots(ours, n, rows))
    return _eager_steps(settings, ours, cache, rows)


@torch.no_grad()
def offloading_steps(settings: Settings, n: int, policy: str) -> Record:
    """Time steps beside evicted tokens in host memory, all but the budget of `n` random ones."""
    ours, budget = models(settings.device, settings.tiny)[0], budget_of(settings)
    _check_room(settings, 4 * budget * _token_bytes(ours))
    ids = torch.randint(0, ours.config.vocab_size, (1, 2 * budget), device=ours.device)
    cache = kvtool_prompt(ours, ids, policy_for(policy, settings), budget, "full")
    more = n - 2 * budget
    for layer in cache.slot_layers:
        shape = 1, layer.slots.kv_heads, more, ours.config.head_dim
        pair = (torch.randn(shape, device=ours.device, dtype=ours.dtype) for _ in range(2))
        places = torch.arange(more, device=ours.device, dtype=torch.int32)
        tokens = *pair, places.expand(1, shape[1], -1)
        Calibration.of(layer).store.append(iter([tokens]), more, True)
    found = _eager_steps(settings, ours, cache, 1)
    frequency = [each for each in cache.report().recompute_frequency or () if each is not None]
    return found | {
        "host_bytes": cache.report().host_bytes,
        "recompute_frequency": statistics.mean(frequency),
    }


def _eager_steps(settings: Settings, model: PreTrainedModel, cache, rows: int) -> Record:
    token = torch.full((rows,), 7, device=model.device)
    ms, warm = _time(settings, lambda: decode_step(model, cache, token))
    return {"ms": ms, "read_bytes": cache.report().traffic_bytes, "first_s": warm}


@torch.no_grad()
def prompt(settings: Settings, n: int, policy: str | None, mode: str) -> Record:
    """Time one prompt, at twice the budget of decoding, and the growth of memory at its peak."""
    ours, plain = models(settings.device, settings.tiny)
    model = plain if policy is None else ours
    _check_room(settings, int(1.2 * n * _token_bytes(model)))
    ids = torch.randint(0, model.config.vocab_size, (1, n), device=model.device)

    def read(ids: torch.Tensor):
        if policy is None:
            return dynamic_prompt(plain, ids)
        return kvtool_prompt(ours, ids, policy, 2 * budget_of(settings), mode)

    read(ids[:, : n // 8])  # what is compiled or set up once
    _settle()
    peak = Peak(watched_devices(model))
    settings.wait()
    start = time.perf_counter()
    cache = read(ids)
    settings.wait()
    seconds = time.perf_counter() - start
    stored = stored_mib(cache) if policy is None else cache.report().kv_bytes / 2**20
    growth = peak.growth()
    return {"s": seconds, "kv_mib": stored, "peak_mib": None if growth is None else growth / 2**20}


def release() -> None:
    """Let go of the models."""
    models.cache_clear()
    _settle()


# ---- tables


def table(records: dict[str, Record], machine: Record) -> list[Table]:
    """Show each policy beside the fastest full cache of the same context and batch."""
    return [*_decode_table(records, machine), *_prompt_table(records)]


def share_of_gain(full: Record, policy: Record, weights: int) -> float:
    """Return (time of full / time of policy) / (bytes of full / bytes of policy)."""
    possible = (weights + full["read_bytes"]) / (weights + policy["read_bytes"])
    return full["ms"] / policy["ms"] / possible


def _decode_table(records: dict[str, Record], machine: Record) -> list[Table]:
    copied = records.get("copy", {})
    if copied.get("state") != "ok":
        return []
    weights, bandwidth = copied["weight_bytes"], copied["bytes_per_s"]
    shape = "tiny, on " if machine["tiny"] else ""
    shown = Table(
        title=f"decode ({shape}{machine['device']}, {bandwidth / 1e9:.0f} GB/s copying)",
        show_edge=False,
    )
    shown.add_column("rows x context")
    shown.add_column("cache")
    names = ("ms a step", "eager ms", "GB/s", "of copying", "times as fast", "possible")
    for name in (*names, "share of it"):
        shown.add_column(name, justify="right")
    done = {k: r for k, r in records.items() if k.startswith("decode") and "ms" in r}
    for rows, n in dict.fromkeys(tuple(key.split(" ")[1:4:2]) for key in done):
        if n == "any":
            continue
        here = {}
        for key, record in done.items():
            _, own, _, context, variant = key.split(" ", 4)
            if own == rows and context in (n, "any"):
                here[variant] = record
        full = [record for variant, record in here.items() if variant.startswith("full")]
        fastest = min(full, key=lambda record: record["ms"], default=None)
        for variant, record in here.items():
            total = weights + record["read_bytes"]
            speed = total / record["ms"] * 1e3
            eager = f"{record['eager_ms']:.2f}" if "eager_ms" in record else ""
            cells = [f"{record['ms']:.2f}", eager, f"{speed / 1e9:.0f}", f"{speed / bandwidth:.0%}"]
            if fastest is not None:
                cells.append(f"{fastest['ms'] / record['ms']:.2f}")
                possible = (weights + fastest["read_bytes"]) / total
                beside = [f"{possible:.2f}", f"{share_of_gain(fastest, record, weights):.0%}"]
                cells += beside if not variant.startswith("full") else ["", ""]
            shown.add_row(f"{rows} x {n}", variant, *cells)
        shown.add_section()
    shown.caption = (
        "times as fast: as the fastest full cache of the same rows and context; possible: bytes "
        "read there over bytes read here, weights included; an evictor's step is measured once for "
        "any context, on which it does not depend"
    )
    if not machine["tiny"]:
        shown.caption += f"; {AIMS}"
    return [shown]


def _prompt_table(records: dict[str, Record]) -> list[Table]:
    shown = Table(title="prompts, against DynamicCache with sdpa read at once", show_edge=False)
    shown.add_column("tokens", justify="right")
    shown.add_column("cache")
    for name in ("s", "ratio", "K/V MiB", "ratio", "peak MiB", "ratio"):
        shown.add_column(name, justify="right")
    for key, record in records.items():
        if not key.startswith("prompt") or "s" not in record:
            continue
        _, n, variant = key.split(" ", 2)
        full = records.get(f"prompt {n} full", {})
        cells = []
        for name, form in (("s", ".2f"), ("kv_mib", ".1f"), ("peak_mib", ".0f")):
            own, whole = record.get(name), full.get(name)
            cells.append("" if own is None else f"{own:{form}}")
            cells.append(f"{own / whole:.2f}" if own is not None and whole else "")
        shown.add_row(n, variant, *cells)
    return [shown] if shown.row_count else []
