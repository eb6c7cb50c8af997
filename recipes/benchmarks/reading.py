"""Decode steps of sparse readers against DynamicCache with sdpa, on a random 42M-parameter Llama.

    python -m recipes.benchmarks.reading                   # 32K tokens, 512 pairs; 2 min
    python -m recipes.benchmarks.reading --compile         # compiled steps of kvtool; 5 min

Caches are filled with random keys and values in place of a prompt: what a step costs does not
depend on them. Steps of a policy and of the baseline take turns, so that a change of the machine's
speed meets both; the ratios are medians of pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

import kvtool
from kvtool.cache.features.sparse_index import SparseIndex
from kvtool.cache.slots.buffers import Slots
from kvtool.cache.slots.sizing import LayerBudget
from kvtool.generation import decode_step
from kvtool.generation.graphs import StaticDecoding
from recipes.benchmarks.models import build_models
from recipes.benchmarks.speed import median_ratio, time_steps

POLICIES = ("rocketkv", "rocketkv-mt", "quest", "sparq", "loki", "hsa", "exact-topk(scope=group)")
POLICIES += ("exact-topk", "full")
WARM = 4  # steps, in which graphs are made


@dataclass(frozen=True)
class Line:
    """One measurement; the ratio is against DynamicCache + sdpa in the same run."""

    policy: str
    stored: int
    traffic_pairs: float
    state_mib: float
    decode_ms: float
    decode_ratio: float


def random_slots(model, tokens: int, batch: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer, where the model is and in its dtype, one after another."""
    config, place = model.config, {"device": model.device, "dtype": model.dtype}
    shape = (batch, config.num_key_value_heads, tokens, config.head_dim)
    layers = range(config.num_hidden_layers)
    return ((torch.randn(shape, **place), torch.randn(shape, **place)) for _ in layers)


def filled_dynamic(model, slots) -> DynamicCache:
    """A full cache."""
    cache = DynamicCache(config=model.config)
    for i, (keys, values) in enumerate(slots):
        cache.update(keys, values, i)
    return cache


def filled(model, policy: str, budget: int, slots) -> kvtool.cache.whole.cache.KVCache:
    """A cache as after a prompt, holding as much of it as the policy would.

    Args:
        slots: keys and values of each layer, which may be made as they are asked for.
    """
    kept = None if policy == "full" else budget
    cache = kvtool.build_cache(model, policy, kept)
    for layer, (keys, values) in zip(cache.slot_layers, slots, strict=True):
        length = keys.shape[2]
        layer.lazy_initialization(keys, values)
        count, reads = length, cache.budgets.traffic
        if cache.policy.two_stages:
            count = reads.stored(layer, length)
            layer.set_budget(LayerBudget.of([count]))
        whole = torch.arange(length, dtype=torch.int32, device=keys.device)
        whole = whole.expand(*keys.shape[:2], -1)
        positions = whole[..., length - count :]
        if cache.policy.select_only:
            SparseIndex.of(layer).select(positions)
            count, positions = length, whole
        layer.count_from(length, None)
        stored = {"keys": keys[:, :, -count:], "values": values[:, :, -count:]}
        layer.slots.replace(Slots(stored, positions, {}))
        if reads is not None:
            reads.end_prompt([length] * len(keys))
    return cache


def measure(args: argparse.Namespace, note) -> list[Line]:
    ours, plain = build_models()
    slots = list(random_slots(ours, args.length, args.rows))
    full, token = filled_dynamic(plain, slots), torch.full((args.rows,), 7)
    base_step = lambda: plain(token[:, None], past_key_values=full)  # noqa: E731
    lines = []
    for policy in args.policies:
        note(policy)
        cache = filled(ours, policy, args.budget, slots)
        decode = decode_step
        if args.compile:
            torch._dynamo.reset()
            decode = StaticDecoding(ours, args.steps + WARM, backend=args.compile, compiled=True)
        our_step = lambda: decode(ours, cache, token)  # noqa: B023, E731
        mine, theirs = time_steps([our_step, base_step], args.steps, WARM)
        report = cache.report()
        if not lines:
            base = statistics.median(theirs)
            lines.append(Line("DynamicCache", args.length, args.length, 0, base, 1))
        lines.append(
            Line(
                policy,
                report.kept_per_layer[0],
                report.traffic_pairs,
                report.state_bytes / 2**20,
                statistics.median(mine),
                median_ratio(mine, theirs),
            )
        )
    return lines


def show(lines: list[Line]) -> None:
    table = Table(title="decode steps (ratio below 1 is faster than DynamicCache + sdpa)")
    for name in ("policy", "stored", "pairs read", "state MiB", "decode ms", "ratio"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for line in lines:
        table.add_row(
            line.policy,
            f"{line.stored}",
            f"{line.traffic_pairs:.0f}",
            f"{line.state_mib:.1f}",
            f"{line.decode_ms:.1f}",
            f"{line.decode_ratio:.2f}",
        )
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--rows", type=int, default=1, help="texts in a batch (1)")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--compile", nargs="?", const="inductor", help="by a backend of torch")
    parser.add_argument("--steps", type=int, default=24, help="decoded tokens")
    parser.add_argument("--json", type=Path, help="also write the lines here")
    args = parser.parse_args()
    with torch.inference_mode():
        lines = measure(args, lambda text: print(text, file=sys.stderr))
    if args.json:
        args.json.write_text(json.dumps([asdict(line) for line in lines], indent=1))
    show(lines)


if __name__ == "__main__":
    main()
