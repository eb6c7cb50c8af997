"""What a decoded token of CaliDrop costs beside its base: never, every eighth and every time anew.

    python -m recipes.benchmarks.calidrop                     # about 4 min, 2 cores
    python -m recipes.benchmarks.calidrop --model smollm2 --text texts/austen/emma.txt

Random Llama of `recipes.benchmarks.models`, a prompt of 4096 tokens, read at once. Which steps look
at the evicted tokens anew is forced, for all heads of all layers together, which is the worst case;
every step calibrates. With a model of yours and a text, the tokens that follow the prompt are read
one by one, and queries decide as they do for a user. Steps of both take turns; ratios are medians
over rounds of eight.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import kvtool
from kvtool.cache.features.calidrop import Calibration
from kvtool.cache.whole.cache import KVCache
from kvtool.generation import decode_step, prefill
from kvtool.generation.feeding import wait
from kvtool.models.load import load
from kvtool.policies.evicted.calidrop import CaliDrop
from recipes.benchmarks.models import build_models
from recipes.benchmarks.speed import time_steps

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


def text_step(model, cache, ids: torch.Tensor):
    """A step that reads the next token of a text, at each call."""
    tokens = iter(ids.unbind(1))
    return lambda: decode_step(model, cache, next(tokens))


def rounds(times: list[float]) -> list[float]:
    """Milliseconds of each round of eight steps, per step."""
    return [sum(times[i : i + ROUND]) / ROUND for i in range(0, len(times), ROUND)]


@dataclass(frozen=True)
class CalibratedLine:
    """Milliseconds of a step beside those of the base without calibration, in turns.

    Attributes:
        anew: which steps attend to evicted tokens anew: never, every 8th, always or a share.
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


def read_line(model, base: str, budget: int, ids: torch.Tensor, count: int) -> CalibratedLine:
    """Read a number of rounds of a text's tokens behind a prompt, with and without calibration."""
    steps, later = [], (count + 1) * ROUND
    for policy in (base, f"{base}+calidrop"):
        cache = filled(model, policy, budget, ids[:, :-later])
        steps.append(text_step(model, cache, ids[:, -later:]))
    theirs, mine = map(rounds, time_steps(steps, count * ROUND, ROUND, lambda: wait(model)))
    ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
    found = cache.report()
    shares = [each for each in found.recompute_frequency or [] if each is not None]
    anew = f"{statistics.mean(shares):.2f} of heads"
    base_ms, ms = statistics.median(theirs), statistics.median(mine)
    return CalibratedLine(base, anew, base_ms, ms, ratio, found.host_bytes)


def lines_of(base: str, args: argparse.Namespace) -> Iterator[CalibratedLine]:
    """Measure a base, on a random model or on one that reads a text."""
    if args.model is None:
        model, _ = build_models()
        ids = torch.randint(0, model.config.vocab_size, (1, args.length))
        yield from calibrated_lines(model, base, args.budget, ids, args.rounds)
        return
    loaded = load(args.model, dtype="float32")
    kvtool.attach(loaded.model)
    count = args.length + (args.rounds + 1) * ROUND
    text = args.text.read_text()[: count * 8]
    ids = loaded.tokenizer(text, return_tensors="pt").input_ids[:, :count]
    if ids.shape[1] < count:
        raise SystemExit(f"{args.text} has fewer than {count} tokens")
    yield read_line(loaded.model, base, args.budget, ids, args.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bases", nargs="+", default=["snapkv", "h2o", "streaming"])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=4, help="of eight decoded tokens")
    parser.add_argument("--model", help="that reads --text, as in `kvtool generate`")
    parser.add_argument("--text", type=Path, help="whose tokens are read")
    args = parser.parse_args()
    if (args.model is None) != (args.text is None):
        parser.error("--model and --text go together")
    table = Table(title=f"decode of +calidrop against its base, {args.length} tokens")
    for name in ("base", "anew", "base ms", "ms", "ratio", "host MiB"):
        table.add_column(name, justify="left" if name in ("base", "anew") else "right")
    with torch.inference_mode():
        for base in args.bases:
            print(base, file=sys.stderr)
            for line in lines_of(base, args):
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
