"""What `kvtool profile` costs over a plain forward, on a random 42M-parameter Llama.

    python -m recipes.benchmarks.profile                            # about 15 min, one core
    python -m recipes.benchmarks.profile --lengths 1024 --samples 2

The default metrics over some texts against plain runs of the same texts, one by one, with
transformers' own cache and sdpa: the texts alone, and with as many greedily decoded tokens. The
runs take turns, so that a change of the machine's speed meets all; ratios are medians over turns,
of processor time, which other processes change less than wall time. Memory is the growth of the
process's peak resident size over a run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from kvtool.profiling.measure import measure
from kvtool.profiling.request import DEFAULT, METRICS, Plan
from recipes.benchmarks.models import build_models
from recipes.benchmarks.speed import reset_peak, resident_mib


def plain(model, texts, steps: int) -> None:
    """A forward over each text, and some decoded tokens."""
    with torch.inference_mode():
        for ids in texts:
            cache = DynamicCache(config=model.config)
            logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
            for _ in range(steps):
                logits = model(logits[:, -1:].argmax(-1), past_key_values=cache).logits


def cost(run) -> tuple[float, float]:
    """Processor seconds and growth of the peak, in MiB."""
    before, start = reset_peak(), time.process_time()
    run()
    return time.process_time() - start, resident_mib(peak=True) - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--metrics", nargs="+", default=list(DEFAULT), choices=METRICS[:-1])
    parser.add_argument("--repeats", type=int, default=1, help="turns")
    args = parser.parse_args()
    ours, theirs = build_models()
    plan = Plan(tuple(args.metrics), args.decode, "h2o", (128, 512))
    title = f"{args.samples} texts: {' '.join(args.metrics)}; ratios to plain runs"
    table = Table(title=title)
    for name in ("tokens", "texts s", "+ decode s", "profile s", "/ texts", "/ both", "MiB"):
        table.add_column(name, justify="right")
    table.add_column("plain MiB", justify="right")
    for length in args.lengths:
        texts = list(torch.randint(0, ours.config.vocab_size, (args.samples, 1, length)))
        runs = (
            lambda: plain(theirs, texts, 0),  # noqa: B023
            lambda: plain(theirs, texts, args.decode),  # noqa: B023
            lambda: measure(ours, texts, plan),  # noqa: B023
        )
        turns = []
        for turn in range(args.repeats):
            print(f"{length} tokens, turn {turn + 1}", file=sys.stderr)
            turns.append([cost(run) for run in runs])
        seconds = [statistics.median(turn[i][0] for turn in turns) for i in range(3)]
        ratios = [statistics.median(turn[2][0] / turn[i][0] for turn in turns) for i in range(2)]
        peaks = [max(turn[i][1] for turn in turns) for i in (2, 1)]
        table.add_row(
            f"{length}",
            *(f"{value:.2f}" for value in (*seconds, *ratios)),
            *(f"{peak:.0f}" for peak in peaks),
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
