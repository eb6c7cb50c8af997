"""Time steps of an 8B shape over a cache: the device's own time, and what the host adds to it."""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from rich.table import Table
from transformers import PreTrainedModel

import kvtool
from kvtool.errors import KvtoolError
from recipes.benchmarks import decoding
from recipes.benchmarks.gpu.results import Case, Record, Skip, Wrong
from recipes.benchmarks.gpu.settings import Settings
from recipes.benchmarks.models import build_models, with_weights_of
from recipes.benchmarks.reading import filled, random_slots

STATIC = "StaticCache"  # transformers' full cache, the fastest that can be made of it
READERS = ("rocketkv", "quest", "hsa")
STORED = {"rocketkv": 0.25}  # of the tokens, at most; what is not named stores all
GROWTH = 1.4  # of the bytes of these: buffers grow by a quarter, tables come to it
SPARE = 3 * 2**30  # bytes of a GPU that are left to activations and graphs
AHEAD = 2.5e9  # cycles a second at most: for so long the device waits until the host is ahead


def budget_of(settings: Settings) -> int:
    """Tokens kept or read."""
    return 16 if settings.tiny else 512


def long(settings: Settings) -> int:
    """Tokens of the usual context."""
    return 96 if settings.tiny else 32768


@functools.cache
def models(device: str, tiny: bool) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the same weights with kvtool's attention and with sdpa."""
    shape, dtype = ("tiny", torch.float32) if tiny else ("8b", torch.bfloat16)
    return build_models(shape, device, dtype)


@contextlib.contextmanager
def endless(model: PreTrainedModel) -> Iterator[None]:
    """Let no token end an answer inside."""
    settings = model.generation_config
    ends, settings.eos_token_id = settings.eos_token_id, None
    try:
        yield
    finally:
        settings.eos_token_id = ends


def policy_for(policy: str, settings: Settings) -> str:
    """Shorten SnapKV's window where the budget is smaller than it."""
    if settings.tiny and policy.startswith("snapkv"):
        return policy.replace("snapkv", "snapkv(window=4)", 1)
    return policy


def settle() -> None:
    """Give graphs and caches of the case before back."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def release() -> None:
    """Let go of the models."""
    models.cache_clear()
    settle()


def copy_case(settings: Settings) -> Case:
    """Measure the bandwidth of a large copy."""

    def copy() -> Record:
        plain = models(settings.device, settings.tiny)[1]
        return {"bytes_per_s": decoding.copy_bandwidth(plain)}

    return Case("copy", copy, seconds=2)


def step_case(settings: Settings, rows: int, n: int, policy: str, how: str) -> Case:
    """Time steps over so many rows of a context; seconds are those of one row on an H200.

    Args:
        how: eager, captured (a CUDA graph, not compiled) or compiled (and captured); of the full
            cache also "compiled, masked" and "compiled, not tuned".
    """
    compiling = (45 if policy == STATIC else 60) if how.startswith("compiled") else 0
    seconds = compiling + 4 + 0.3 * rows * (policy in (STATIC, *READERS))
    run = partial(steps, settings, rows, n, policy, how)
    return Case(f"{rows} x {n} {policy}, {how}", run, seconds=seconds)


def token_bytes(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of a token."""
    config = model.config
    heads = config.num_hidden_layers * config.num_key_value_heads
    return 2 * heads * config.head_dim * model.dtype.itemsize


def rows_that_fit(settings: Settings, rows: int, row_bytes: float) -> int:
    """Return how many rows have room beside the weights.

    Raises:
        Skip: not a single one.
    """
    if not settings.cuda:
        return rows
    free = torch.cuda.mem_get_info(settings.device)[0] - SPARE
    if row_bytes > free:
        needed = f"a row needs {row_bytes / 2**30:.0f} GiB of K/V"
        raise Skip(f"{needed}, and {free / 2**30:.0f} are free")
    return min(rows, int(free // row_bytes))


def runs_of(settings: Settings, how: str) -> tuple[int, int]:
    """How many runs are timed, and of how many steps each."""
    if settings.tiny:
        return 1, 3
    return (3, 4) if how == "eager" else (5, 16)


def time_runs(settings: Settings, step: Callable[[], object], how: str) -> Record:
    """Time runs of steps: medians of the wall's and of the device's milliseconds a step.

    Within a run nobody waits for a step. For the device's own time it sleeps until the host has
    handed the run over, so that the wall's time beyond it is what the device waits for the host.
    An eager step has more kernels than the queue takes, so its own time is an upper bound.

    Returns:
        Also the seconds of the first steps, in which graphs are made.
    """
    runs, count = runs_of(settings, how)
    start = time.perf_counter()
    for _ in range(decoding.WARM):
        step()
    settings.wait()
    found = {"first_s": time.perf_counter() - start}
    wall: list[float] = []
    device: list[float] = []
    for _ in range(runs):
        start = time.perf_counter()
        for _ in range(count):
            step()
        settings.wait()
        wall.append((time.perf_counter() - start) / count * 1e3)
    for _ in range(runs if settings.cuda else 0):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(wall[0] / 1e3 * count * AHEAD))
        first.record()
        for _ in range(count):
            step()
        last.record()
        settings.wait()
        device.append(first.elapsed_time(last) / count)
    found["ms"] = statistics.median(wall)
    return found | ({"device_ms": statistics.median(device)} if device else {})


Known = Callable[[], tuple[int, int, bool]]  # bytes read, bytes held, whether graphs ran


def static_cache(
    settings: Settings, rows: int, n: int, how: str, room: int
) -> tuple[Callable[[], None], Known]:
    """Make the step of transformers' full cache."""
    model = with_weights_of(models(settings.device, settings.tiny)[1])
    model.set_attn_implementation("sdpa" if how.endswith("masked") else "unmasked")
    backend = settings.backend if how.startswith("compiled") else None
    options = {"tuned": not how.endswith("not tuned"), "graphs": how != "eager"}
    full = decoding.FullCacheSteps(model, n, room, backend, rows, **options)
    return full, lambda: (full.read_bytes(), full.read_bytes(), full.captured)


def evicts(policy: str) -> bool:
    """Whether a step of the policy depends on the budget alone."""
    return policy not in (STATIC, "full") and kvtool.parse_policy(policy).reader is None


def kvtool_cache(
    settings: Settings, rows: int, n: int, policy: str, how: str, room: int
) -> tuple[Callable[[], torch.Tensor], Known]:
    """Make the step of a policy."""
    ours, budget = models(settings.device, settings.tiny)[0], budget_of(settings)
    if evicts(policy):
        cache = decoding.prompted(ours, policy_for(policy, settings), budget, rows)
    else:
        cache = filled(ours, policy, budget, random_slots(ours, n, rows))
    decode = decoding.steps_of(ours, room, how, settings.backend)
    token = torch.full((rows,), 7, device=ours.device)

    def known() -> tuple[int, int, bool]:
        report, ran = cache.report(), decode.steps
        held = report.allocated_bytes + report.state_bytes
        return report.traffic_bytes, held, ran.cuda_graphs

    return partial(decode, ours, cache, token), known


@torch.no_grad()
def steps(settings: Settings, rows: int, n: int, policy: str, how: str) -> Record:
    """Time steps, and count the cache's bytes and the device's while they run.

    Policies that evict hold their budget after a prompt of twice as many tokens: their steps do not
    depend on a longer one. Others are filled with random keys and values.

    Raises:
        Skip: no row fits.
        Wrong: it cannot be compiled, or did not run as a CUDA graph.
    """
    settle()
    plain = models(settings.device, settings.tiny)[1]
    runs, count = runs_of(settings, how)
    room = decoding.WARM + 2 * runs * count + 2
    stored = n if policy == STATIC else n * STORED.get(policy, 1) * GROWTH
    tokens = 4 * budget_of(settings) if evicts(policy) else stored
    fit = rows_that_fit(settings, rows, tokens * token_bytes(plain))
    before = torch.cuda.memory_allocated(settings.device) if settings.cuda else 0
    if policy == STATIC:
        step, known = static_cache(settings, fit, n, how, room)
    else:
        step, known = kvtool_cache(settings, fit, n, policy, how, room)
    if settings.cuda:
        torch.cuda.reset_peak_memory_stats(settings.device)  # what filling took is gone
    try:
        found = time_runs(settings, step, how)
    except KvtoolError as error:
        raise Wrong(f"runs eagerly only: {error}") from error
    read, held, graphs = known()
    found |= {"rows": fit, "tokens_per_s": fit / found["ms"] * 1e3, "kv_bytes": held}
    found["read_bytes"] = read + decoding.weight_bytes(plain)
    if settings.cuda:
        found["peak_bytes"] = torch.cuda.max_memory_allocated(settings.device) - before
        check_graphs(found, how, graphs)
    return found


def check_graphs(found: Record, how: str, graphs: bool) -> None:
    """Refuse steps of a GPU that were no CUDA graph, though they should have been one."""
    if how != "eager" and not graphs:
        raise Wrong("no CUDA graph was recorded", found)


def table(records: dict[str, Record], machine: Record) -> list[Table]:
    """Show each cache beside the fastest `StaticCache` of the same rows and context."""
    shown = Table(title=f"decode ({machine['device']})", show_edge=False)
    shown.add_column("rows x context")
    shown.add_column("cache, step")
    names = ("rows", "ms", "of the device", "GB/s", "tokens/s", "times", "K/V MiB", "share")
    for name in (*names, "peak MiB"):
        shown.add_column(name, justify="right")
    done = {tuple(k.split(" ", 3)): r for k, r in records.items() if "kv_bytes" in r}
    for place in dict.fromkeys((rows, n) for rows, _, n, _ in done):
        here = {key[3]: record for key, record in done.items() if (key[0], key[2]) == place}
        full = [record for name, record in here.items() if name.startswith(STATIC)]
        fastest = max(full, key=lambda each: each["tokens_per_s"], default=None)
        for name, record in here.items():
            device, peak = record.get("device_ms"), record.get("peak_bytes")
            shown.add_row(
                " x ".join(place),
                name,
                f"{record['rows']}",
                f"{record['ms']:.2f}",
                "" if device is None else f"{device:.2f}",
                f"{record['read_bytes'] / record['ms'] / 1e6:.0f}",
                f"{record['tokens_per_s']:.0f}",
                f"{record['tokens_per_s'] / fastest['tokens_per_s']:.2f}" if fastest else "",
                f"{record['kv_bytes'] / 2**20:.0f}",
                f"{record['kv_bytes'] / fastest['kv_bytes']:.3f}" if fastest else "",
                "" if peak is None else f"{peak / 2**20:.0f}",
            )
        shown.add_section()
    speed = records.get("copy", {}).get("bytes_per_s")
    copied = "" if speed is None else f"; copying: {speed / 1e9:.0f} GB/s"
    shown.caption = (
        "ms beyond the device's own: it waits for the host; GB/s: weights and K/V that are read; "
        f"times, share: of the fastest {STATIC} here; peak: beyond the weights{copied}"
    )
    return [shown] if shown.row_count else []
