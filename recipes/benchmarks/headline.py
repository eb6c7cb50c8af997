"""What kvtool promises about speed, in one run: compiled decode steps, and long prompts in blocks.

    python -m recipes.benchmarks.headline                                # about 20 min, 2 cores
    python -m recipes.benchmarks.headline --device cuda --shape 8b --dtype bfloat16 \\
        --lengths 8192 32768 102400                                    # GPU, random 8B Llama

The decode table sets compiled steps of each policy at `--budget` tokens against compiled steps over
full caches: of as many tokens, and of `--lengths`. On a GPU both use CUDA graphs. Steps of the full
cache and the policy's eager and compiled ones take turns, so that a change of the machine's speed
meets all; times are medians and ratios medians of pairs. The share of the memory limit is what a
step must read (weights, but of the input embedding; keys and values attended to), over its time,
over the bandwidth of a large copy in the same process; reading alone can be faster than that.
A policy's prompt is of twice its budget: what a step costs does not depend on a longer one.

The turns table sets the eager steps of each policy against those of the first one, step by step in
the same round, the steps that cut included: less noise than the ratios above have among each other.

The beside table, made where it is asked for, sets eager and compiled steps of each policy against
those of the first one in the same round, cuts included; `--policies leaders` are those of 2026:

    python -m recipes.benchmarks.headline --tables beside --policies leaders    # about 10 min

The prefill table sets a prompt in blocks against DynamicCache with sdpa: time, K/V bytes from the
tensors, and the growth of memory at its peak. The whole table does the same of prompts that are
read at once, by policies that sum the attention of every query; it is made where it is asked for.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from recipes.benchmarks.decoding import ATTENTIONS, WARM, DecodeLine, copy_bandwidth, decode_lines
from recipes.benchmarks.models import SHAPES, build_models
from recipes.benchmarks.prefilling import PrefillLine, prefill_lines, whole_lines
from recipes.benchmarks.turns import BesideLine, TurnLine, beside_lines, turn_lines

LENGTHS = (8192, 32768, 102400)
POLICIES = ("h2o", "h2o+caote", "roco", "snapkv", "tova", "h2o+every(steps=64)", "rkv", "keydiff")
POLICIES += ("h2o+int8", "h2o+fp8", "h2o+int4")
SUMMING = ("h2o", "roco", "scissorhands", "d2o")
LEADERS = (
    "h2o",
    "knorm",
    "lagkv",
    "triattention(prompt=false)",
    "snapkv",
    "snapkv+every(steps=64)",
)
LEADERS += ("snapkv+critical", "snapkv+refit", "h2o+k8v4")
TABLES = ("decode", "turns", "prefill", "whole", "beside")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def device_name(device: str) -> str:
    """What the vendor calls it."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def describe(model, args: argparse.Namespace) -> dict[str, str | int | float]:
    """The machine and the model."""
    return {
        "device": device_name(args.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "copy_bytes_per_s": copy_bandwidth(model),
    }


def decode_table(lines: list[DecodeLine]) -> Table:
    title = f"decode at budget {lines[0].budget} against compiled full caches (below 1: faster)"
    table = Table(title=title)
    for name in ("policy", "full cache", "tokens"):
        table.add_column(name, justify="right" if name == "tokens" else "left")
    for name in ("full ms", "of limit", "eager ms", "ratio", "compiled ms", "ratio", "of limit"):
        table.add_column(name, justify="right")
    table.add_column("graphs", justify="right")
    for i, line in enumerate(lines):
        if i and lines[i - 1].policy != line.policy:
            table.add_section()
        table.add_row(
            line.policy,
            line.attention,
            f"{line.length}",
            f"{line.full_ms:.2f}",
            f"{line.full_share:.0%}",
            f"{line.eager_ms:.2f}",
            f"{line.eager_ratio:.2f}",
            f"{line.compiled_ms:.2f}",
            f"{line.ratio:.2f}",
            f"{line.share:.0%}",
            f"{line.graphs}",
        )
    return table


def turns_table(lines: list[TurnLine]) -> Table:
    one = lines[0]
    title = f"{one.steps} eager steps at budget {one.budget} in turns, cuts included"
    table = Table(title=title)
    table.add_column("policy")
    for name in ("mean ms", f"over {one.first}", "median of pairs"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(line.policy, f"{line.ms:.2f}", f"{line.ratio:.3f}", f"{line.paired:.3f}")
    return table


def beside_table(lines: list[BesideLine]) -> Table:
    one = lines[0]
    title = f"{one.steps} steps at budget {one.budget} beside those of {one.first}, cuts included"
    table = Table(title=title)
    table.add_column("policy", no_wrap=True)
    for kind in ("eager", "compiled"):
        for name in (f"{kind} ms", f"over {one.first}", "paired"):
            table.add_column(name, justify="right")
    table.add_column("graphs", justify="right")
    table.add_column("left eager", justify="right")
    for line in lines:
        table.add_row(
            line.policy,
            f"{line.eager_ms:.2f}",
            f"{line.eager_ratio:.3f}",
            f"{line.eager_paired:.3f}",
            f"{line.compiled_ms:.2f}",
            f"{line.compiled_ratio:.3f}",
            f"{line.compiled_paired:.3f}",
            f"{line.graphs}",
            f"{line.left_eager}",
        )
    return table


def prefill_table(lines: list[PrefillLine]) -> Table:
    one = lines[0]
    told = f"prompt of {one.length} tokens in blocks of {one.block}"
    if one.block is None:
        told = "prompts read at once"
    table = Table(title=f"{told} at budget {one.budget}, against DynamicCache + sdpa")
    table.add_column("policy")
    table.add_column("tokens", justify="right")
    for name in ("full s", "s", "ratio", "full K/V MiB", "K/V MiB", "ratio", "full peak MiB"):
        table.add_column(name, justify="right")
    for name in ("peak MiB", "ratio"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(
            line.policy,
            f"{line.length}",
            f"{line.full_s:.2f}",
            f"{line.seconds:.2f}",
            f"{line.ratio:.2f}",
            f"{line.full_kv_mib:.1f}",
            f"{line.kv_mib:.1f}",
            f"{line.kv_ratio:.3f}",
            f"{line.full_peak_mib:.0f}",
            f"{line.peak_mib:.0f}",
            f"{line.peak_mib / line.full_peak_mib:.2f}" if line.full_peak_mib else "-",
        )
    return table


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default="42m", help="of the random Llama")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: float32, on a GPU bfloat16",
    )
    parser.add_argument("--tables", nargs="+", choices=TABLES)
    parser.add_argument(
        "--policies", nargs="+", default=POLICIES, help="`leaders`: those of 2026, beside h2o"
    )
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="*",
        help=f"of more full caches; default: none, on a GPU {' '.join(map(str, LENGTHS))}",
    )
    parser.add_argument("--attentions", nargs="+", choices=ATTENTIONS, help="of the full caches")
    parser.add_argument("--steps", type=int, default=60, help="decoded tokens of each")
    parser.add_argument("--turns", type=int, default=128, help="steps of each in turns")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--prefill-policies", nargs="+", default=["h2o"])
    parser.add_argument("--prefill-length", type=int, default=32768)
    parser.add_argument("--prefill-budget", type=int, default=1024)
    parser.add_argument("--whole-policies", nargs="+", default=SUMMING)
    parser.add_argument("--whole-lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--block", type=int, default=128, help="tokens of a prompt at a time")
    parser.add_argument("--repeats", type=int, default=1, help="prompts of each")
    parser.add_argument("--json", type=Path, help="also write the lines here, as they come")
    return parser


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options with their defaults; mistakes end the program."""
    parser = make_parser()
    args = parser.parse_args(argv)
    gpu = args.device == "cuda"
    if gpu and not torch.cuda.is_available():
        parser.error("no CUDA device is there")
    args.tables = args.tables or TABLES[:3]
    groups = [LEADERS if each == "leaders" else (each,) for each in args.policies]
    args.policies = [policy for group in groups for policy in group]
    args.dtype = args.dtype or ("bfloat16" if gpu else "float32")
    args.lengths = (LENGTHS if gpu else ()) if args.lengths is None else args.lengths
    if min((args.budget, *args.lengths)) <= args.steps + WARM:
        parser.error(f"full caches must hold more than --steps + {WARM} tokens")
    if args.attentions is None:
        args.attentions = ("sdpa", "unmasked")
        if gpu and importlib.util.find_spec("flash_attn"):
            args.attentions += ("flash_attention_2",)
        elif gpu:
            note("flash_attention_2 is left out: flash-attn is not installed")
    return args


def header(machine: dict[str, str | int | float]) -> str:
    return (
        f"{machine['device']}, {machine['threads']} threads, "
        f"{machine['copy_bytes_per_s'] / 1e9:.1f} GB/s copying; torch {machine['torch']}, "
        f"transformers {machine['transformers']}; random Llama of "
        f"{machine['parameters'] / 1e6:.0f}M parameters, {machine['dtype']}"
    )


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    args = read_options(argv)
    ours, plain = build_models(args.shape, args.device, getattr(torch, args.dtype))
    machine = describe(plain, args)
    bandwidth = machine["copy_bytes_per_s"]
    parts = {
        "decode": (lambda: decode_lines(ours, plain, args, bandwidth, note), decode_table),
        "turns": (lambda: turn_lines(ours, args, note), turns_table),
        "beside": (lambda: beside_lines(ours, args, note), beside_table),
        "prefill": (lambda: prefill_lines(ours, plain, args, note), prefill_table),
        "whole": (lambda: whole_lines(ours, plain, args, note), prefill_table),
    }
    console, found = Console(width=120), {name: [] for name in parts}
    console.print(header(machine))
    for name in args.tables:
        measure, draw = parts[name]
        for line in measure():
            found[name].append(line)
            if args.json:
                lines = {part: [asdict(line) for line in found[part]] for part in found}
                args.json.write_text(json.dumps({"machine": machine, **lines}, indent=1))
        if found[name]:
            console.print(draw(found[name]))
    each = len(args.attentions) * (1 + len(args.lengths))
    comparisons = {"decode": len(args.policies) * each, "beside": len(args.policies)}
    wanted = sum(count for name, count in comparisons.items() if name in args.tables)
    failed = wanted - len(found["decode"]) - len(found["beside"])
    if failed:
        sys.exit(f"{failed} of {wanted} comparisons failed, see above")


if __name__ == "__main__":
    main()
