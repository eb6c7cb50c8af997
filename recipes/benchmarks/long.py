"""Prompts of up to 128K tokens read in blocks on a CPU: seconds, and memory that stays flat.

    python -m recipes.benchmarks.long                                    # about 10 min, 2 cores
    python -m recipes.benchmarks.long --lengths 8192 --policies snapkv

A random Llama of 42 million parameters reads each prompt once, after a short one that is not
counted. Peak is the growth of the process's resident memory above what it was with the weights
loaded; K/V bytes come from the tensors; `a token` is set against the shortest prompt, so 1.0 means
that time is linear in the length. Policies that hold a prompt until its end are read up to 32K
tokens and say so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from recipes.benchmarks.models import build_models
from recipes.benchmarks.speed import kvtool_prompt, run_prompt

LENGTHS = (8192, 32768, 131072)
POLICIES = ("h2o+caote", "roco", "snapkv")
HOLDING = ("rocketkv",)
HELD_LENGTH = 32768  # longest prompt of those that hold it


@dataclass(frozen=True)
class LongLine:
    """What one policy needs for one prompt.

    Attributes:
        a_token: time of a token, over that of the policy's shortest prompt.
        holds_prompt: whether the policy holds the whole prompt until its end.
    """

    policy: str
    length: int
    seconds: float
    a_token: float
    peak_mib: float
    kv_mib: float
    holds_prompt: bool


def long_lines(args: argparse.Namespace) -> Iterator[LongLine]:
    """Every policy, each prompt length in turn."""
    model, _ = build_models()
    prefill = f"block:{args.block}"
    longest = torch.randint(model.config.vocab_size, (1, max(args.lengths)))
    for policy in (*args.policies, *args.holding):
        holding = policy in args.holding
        first = None
        kvtool_prompt(
            model, longest[:, : args.budget + 2 * args.block], policy, args.budget, prefill
        )
        for length in sorted(args.lengths):
            if holding and length > HELD_LENGTH:
                continue
            print(f"{policy}: {length} tokens", file=sys.stderr, flush=True)
            ids = longest[:, :length]
            run = lambda: kvtool_prompt(model, ids, policy, args.budget, prefill)  # noqa: B023, E731
            seconds, peak, cache = run_prompt(run, model)
            first = first or seconds / length
            stored = cache.report().kv_bytes / 2**20
            yield LongLine(policy, length, seconds, seconds / length / first, peak, stored, holding)
            del cache


def show(lines: Sequence[LongLine], args: argparse.Namespace) -> None:
    """Print the table."""
    table = Table(title=f"prompts in blocks of {args.block} at budget {args.budget}")
    table.add_column("policy")
    for name in ("tokens", "seconds", "a token", "peak MiB", "K/V MiB"):
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(
            line.policy + " (holds the prompt)" * line.holds_prompt,
            f"{line.length}",
            f"{line.seconds:.1f}",
            f"{line.a_token:.2f}",
            f"{line.peak_mib:.0f}",
            f"{line.kv_mib:.1f}",
        )
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--holding", nargs="*", default=HOLDING, help="policies, up to 32K tokens")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--json", type=Path, help="also write the lines here")
    args = parser.parse_args()
    lines = []
    with torch.inference_mode():
        for line in long_lines(args):
            lines.append(line)
            if args.json:
                args.json.write_text(json.dumps([asdict(line) for line in lines], indent=1))
    show(lines, args)


if __name__ == "__main__":
    main()
