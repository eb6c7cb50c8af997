"""Compiled decode against a compiled full cache of the same size, on a random 42M-parameter Llama.

    python -m tests.benchmarks.compiled            # about 10 min on 2 cores, most of it compiling

The baseline is transformers' StaticCache of `budget` tokens under torch.compile. Policy by policy,
its steps, the policy's eager steps and its compiled ones take turns; ratios are medians of pairs.
The compiler begins anew with every policy, since each of its graphs has guards that the next would
have to fail first.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch
from rich.console import Console
from rich.table import Table
from transformers import StaticCache

import kvtool
from kvtool.generation import decode_step, prefill
from kvtool.generation.compiled import CompiledDecoding
from tests.benchmarks.speed import build_models, median_ratio, time_steps

POLICIES = ("full", "streaming", "h2o", "h2o+caote", "roco", "snapkv", "tova")


class StaticSteps:
    """A compiled full cache, filled so far that the steps to come just fit."""

    def __init__(self, model, ids: torch.Tensor, budget: int, room: int) -> None:
        self._cache = StaticCache(config=model.config, max_cache_len=budget)
        self._start = self._seen = budget - room
        with torch.no_grad():
            model(ids[:, : self._start], past_key_values=self._cache, use_cache=True)
        self._forward = torch.compile(model.forward, fullgraph=True)

    @torch.no_grad()
    def __call__(self) -> None:
        positions = torch.full((1, 1), self._seen)
        token = torch.full((1, 1), 7)
        self._forward(input_ids=token, position_ids=positions, past_key_values=self._cache)
        self._seen += 1


def make_steps(model, policy: str, budget: int, ids: torch.Tensor, tokens: int):
    """An eager and a compiled step function over caches of their own, and the compiler's report."""
    token = torch.tensor([7])
    caches = []
    for _ in range(2):
        # a full cache holds as many tokens as the others at most
        prompt = ids[:, : budget - tokens] if policy == "full" else ids
        caches.append(kvtool.build_cache(model, policy, None if policy == "full" else budget))
        prefill(model, caches[-1], prompt)
    compiled = CompiledDecoding(model, tokens)
    return (
        lambda: decode_step(model, caches[0], token),
        lambda: compiled(model, caches[1], token),
        compiled,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    ours, plain = build_models()
    warm = 6
    room = args.steps + 2 * warm
    ids = torch.randint(0, ours.config.vocab_size, (1, 2 * args.budget))
    table = Table(title=f"decode at budget {args.budget}, against a compiled StaticCache of it")
    for column in ("policy", "static ms", "eager ms", "ratio", "compiled ms", "ratio ", "graphs"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy in args.policies:
        print(f"{policy}: compiling", file=sys.stderr)
        torch._dynamo.reset()
        static = StaticSteps(plain, ids, args.budget, room)
        eager, fast, compiled = make_steps(ours, policy, args.budget, ids, room)
        base, slow, quick = time_steps([static, eager, fast], args.steps, warm)
        table.add_row(
            policy,
            f"{statistics.median(base):.2f}",
            f"{statistics.median(slow):.2f}",
            f"{median_ratio(slow, base):.2f}",
            f"{statistics.median(quick):.2f}",
            f"{median_ratio(quick, base):.2f}",
            f"{compiled.report().graphs}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
