"""Bytes that a cache holds and needs at its peak: the device's, the report's, forecast and plan."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
from rich.table import Table
from transformers import PreTrainedModel

import kvtool
from kvtool.cli.main import run as kvtool_command
from kvtool.evaluation.bench.meter import Peak, watched_devices
from kvtool.generation import decode_step, prefill
from kvtool.model_shape import layer_shapes
from kvtool.planning.budgets import even_budgets
from kvtool.planning.bytes import Text, forecast
from kvtool.planning.estimate import prompt_bytes
from kvtool.planning.variants import Variant
from kvtool.sizes import Budget
from recipes.benchmarks.gpu.live import live_bytes
from recipes.benchmarks.gpu.results import Case, Record, Wrong
from recipes.benchmarks.gpu.settings import Settings
from recipes.benchmarks.models import build_models

TITLE = "bytes held after a prompt and new tokens, counted from tensors"
POLICIES = ("full", "streaming", "h2o", "h2o+caote", "roco", "snapkv", "adakv", "d2o", "quest")
POLICIES += ("rocketkv", "snapkv+calidrop")
PLANNED = ("streaming", "h2o", "roco+caote", "snapkv", "d2o", "rocketkv")
UNTOLD = 2**20  # bytes of a GPU that no report counts: clocks, masks, what torch rounds up to
UNTOLD_TINY = 1024  # of a CPU, where nothing is rounded up
SHARE = 0.02
TOGETHER = 8 / 7  # heads of nearly the same count are stored together, unless bytes are promised


def sizes(settings: Settings) -> tuple[int, int, int]:
    """Tokens of the prompt, budget and new tokens."""
    return (160, 48, 4) if settings.tiny else (16384, 1024, 16)


@functools.cache
def model(device: str, tiny: bool) -> PreTrainedModel:
    """Return a model with kvtool's attention."""
    shape, dtype = ("tiny", torch.float32) if tiny else ("42m", torch.bfloat16)
    return build_models(shape, device, dtype)[0]


def cases(settings: Settings) -> Iterator[Case]:
    """Policies in both ways to read a prompt, and plans made for bytes."""
    policies = ("h2o", "snapkv", "quest") if settings.tiny else POLICIES
    for policy, mode in product(policies, ("full", "block")):
        yield Case(f"{policy} {mode}", partial(held, settings, policy, mode), beside=True)
    for policy in ("h2o",) if settings.tiny else PLANNED:
        yield Case(f"plan {policy}", partial(planned, settings, policy), beside=True)


def held(settings: Settings, policy: str, mode: str) -> Record:
    """Read a prompt, decode, and count what the device and the report say.

    Raises:
        Wrong: the device holds more or less than the report says.
    """
    prompt, budget, new = sizes(settings)
    found = _run(settings, policy, mode, {"budget": None if policy == "full" else budget})
    report = found.pop("report")
    found |= {"held_bytes": report, "prompt": prompt, "budget": budget, "new": new}
    found |= foreseen(settings, policy, mode)
    off = found["device_bytes"] - report
    untold = UNTOLD_TINY if settings.tiny else UNTOLD
    if not -untold <= off <= untold + SHARE * report:
        raise Wrong(f"the device holds {off} bytes beside the {report} of the report", found)
    uneven = kvtool.parse_policy(policy).head_split is not None
    for name in ("held_bytes", "kv_peak_bytes"):
        most = found.get(f"forecast_{name}")
        if most is not None and found[name] > most * (TOGETHER if uneven else 1):
            raise Wrong(f"{name}: {found[name]}, and {most} were forecast", found)
    return found


def foreseen(settings: Settings, policy: str, mode: str) -> Record:
    """Forecast the bytes held and, but for readers, the most that exist while a prompt is read."""
    ours, (prompt, budget, new) = model(settings.device, settings.tiny), sizes(settings)
    parsed, dtype = kvtool.parse_policy(policy), str(ours.dtype).removeprefix("torch.")
    text = Text(prompt, new)
    layers = layer_shapes(ours.config, dtype)
    kept = budget if parsed.takes_budget else prompt + new
    held = forecast(parsed, layers, even_budgets(parsed, kept, layers, text), text).storage
    if parsed.reader is not None:
        return {"forecast_held_bytes": held}
    request = Budget.parse(budget) if parsed.takes_budget else None
    variant = Variant(parsed, request, mode)
    peak = prompt_bytes(ours.config, dtype, variant, prompt, new)
    return {"forecast_held_bytes": held, "forecast_kv_peak_bytes": peak}


def _run(settings: Settings, policy: str, mode: str, request: dict) -> Record:
    ours, (prompt, _, new) = model(settings.device, settings.tiny), sizes(settings)
    device = torch.device(settings.device)
    ids = torch.randint(0, ours.config.vocab_size, (1, prompt), device=ours.device)
    before = live_bytes(device)
    peak = Peak(watched_devices(ours))
    with torch.no_grad():
        cache = kvtool.build_cache(ours, policy, prefill=mode, **request)
        prefill(ours, cache, ids, new_tokens=new)
        growth = peak.growth()
        for token in range(new):
            decode_step(ours, cache, torch.tensor([token], device=ours.device))
    report = cache.report()
    return {
        "report": report.allocated_bytes + report.state_bytes,
        "device_bytes": live_bytes(device) - before - _of_host(cache),
        "peak_bytes": growth,
        "kv_peak_bytes": report.peak_bytes,
        "full_bytes": report.full_bytes,
    }


def _of_host(cache) -> int:
    """Bytes in host memory, which on a CPU count as the device's."""
    return cache.report().host_bytes if cache.first_layer.slots.device.type == "cpu" else 0


def planned(settings: Settings, policy: str) -> Record:
    """Plan for bytes, run the plan, and count.

    Raises:
        Wrong: the run holds more than was planned.
    """
    ours, (prompt, _, new) = model(settings.device, settings.tiny), sizes(settings)
    config = ours.config
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    target = token * ours.dtype.itemsize * prompt // 2
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        file = Path(folder) / "plan.yaml"
        options = ["-m", folder, "--bytes", f"{target}", "--context", f"{prompt}", "-p", policy]
        options += ["--dtype", str(ours.dtype).removeprefix("torch."), "--max-new-tokens", f"{new}"]
        code = _command(["plan-budget", *options, "-q", "-o", str(file)])
        if code:
            raise Wrong(f"plan-budget ends with exit code {code}")
        found = _run(settings, policy, "full", {"plan": str(file)})
    report = found.pop("report")
    found |= {"held_bytes": report, "target_bytes": target, "prompt": prompt, "new": new}
    if report > target:
        raise Wrong(f"planned for {target} bytes, held {report}", found)
    return found


def _command(arguments: list[str]) -> int:
    try:
        kvtool_command(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def release() -> None:
    """Let go of the model."""
    model.cache_clear()


def table(records: dict[str, Record], machine: Record) -> list[Table]:
    """Show MiB of each kind."""
    shown = Table(title="MiB", show_edge=False)
    shown.add_column("policy, prompt")
    names = ("full cache", "target", "held", "forecast", "device", "peak K/V", "forecast", "all")
    for name in names:
        shown.add_column(name, justify="right")
    keys = ("full_bytes", "target_bytes", "held_bytes", "forecast_held_bytes", "device_bytes")
    keys += ("kv_peak_bytes", "forecast_kv_peak_bytes", "peak_bytes")
    for key, record in records.items():
        if "held_bytes" not in record:
            continue
        numbers = [record.get(name) for name in keys]
        cells = ["" if number is None else f"{number / 2**20:.2f}" for number in numbers]
        shown.add_row(key, *cells)
    shown.caption = "all: the growth of the device's memory at its peak, activations included"
    return [shown]
