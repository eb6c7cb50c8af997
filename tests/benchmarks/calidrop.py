"""What a decoded token of CaliDrop costs beside its base: never, every eighth and every time anew.

    python -m tests.benchmarks.calidrop                     # about 4 min, 2 cores

Random Llama of `tests.benchmarks.models`, a prompt of 4096 tokens, read at once. Which steps attend
to the evicted tokens anew is forced, for all heads of all layers together, which is the worst case;
every step calibrates. Steps of both take turns; ratios are medians over rounds of eight.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

import kvtool
from kvtool.cache.cache import KVCache
from kvtool.cache.features.calidrop import Calibration
from kvtool.generation import decode_step, prefill
from kvtool.generation.feeding import wait
from kvtool.policies.evicted.calidrop import CaliDrop
from tests.benchmarks.models import build_models
from tests.benchmarks.speed import time_steps

ROUND = 8
OFTEN = {"never": 0, "every 8th": ROUND, "always": 1}
FORCED = {True: CaliDrop(theta1=2, theta2=3), False: CaliDrop(theta1=-3, theta2=-2)}


def filled(model, policy: str, budget: int, ids: torch.Tensor) -> KVCache:
    """A cache after the prompt."""
    cache = kvtool.build_cache(model, policy, budget)
    prefill(model, cache, ids)
    return cache


def calibrated_step(model, cache, every: int, token: torch.Tensor):
    """A step that recomputes at every `every`-th call, never for 0."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        for layer in cache.layers:
            Calibration.of(layer).part = FORCED[every > 0 and count % every == 0]
        decode_step(model, cache, token)

    return step


def rounds(times: list[float]) -> list[float]:
    """Milliseconds of each round of eight steps, per step."""
    return [sum(times[i : i + ROUND]) / ROUND for i in range(0, len(times), ROUND)]


@dataclass(frozen=True)
class CalibratedLine:
    """Milliseconds of a step beside those of the base without calibration, in turns.

    Attributes:
        anew: which steps attend to evicted tokens anew: never, every 8th or always.
    """

    base: str
    anew: str
    base_ms: float
    ms: float
    ratio: float
    host_bytes: int


def calibrated_lines(
    model,
    base: str,
    budget: int,
    ids: torch.Tensor,
    count: int,
    often: Sequence[str] = tuple(OFTEN),
) -> Iterator[CalibratedLine]:
    """Decode a number of rounds of eight tokens after a prompt, with and without calibration."""
    token = torch.full((ids.shape[0],), 7, device=model.device)
    plain = filled(model, base, budget, ids)
    ours = filled(model, f"{base}+calidrop", budget, ids)
    for anew in often:
        steps = [
            lambda: decode_step(model, plain, token),
            calibrated_step(model, ours, OFTEN[anew], token),
        ]
        times = time_steps(steps, count * ROUND, ROUND, lambda: wait(model))
        theirs, mine = map(rounds, times)
        ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
        host = ours.report().host_bytes
        ms = statistics.median(mine)
        yield CalibratedLine(base, anew, statistics.median(theirs), ms, ratio, host)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bases", nargs="+", default=["snapkv", "h2o", "streaming"])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=4, help="of eight decoded tokens")
    args = parser.parse_args()
    model, _ = build_models()
    table = Table(title=f"decode of +calidrop against its base, {args.length} tokens")
    for name in ("base", "anew", "base ms", "ms", "ratio", "host MiB"):
        table.add_column(name, justify="left" if name in ("base", "anew") else "right")
    with torch.inference_mode():
        ids = torch.randint(0, model.config.vocab_size, (1, args.length))
        for base in args.bases:
            print(base, file=sys.stderr)
            for line in calibrated_lines(model, base, args.budget, ids, args.rounds):
                table.add_row(
                    base,
                    line.anew,
                    f"{line.base_ms:.1f}",
                    f"{line.ms:.1f}",
                    f"{line.ratio:.2f}",
                    f"{line.host_bytes / 2**20:.1f}",
                )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
