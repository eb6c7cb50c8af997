"""What an eager step costs beside one of a plain cache of as many tokens, on one and two threads.

    python -m recipes.benchmarks.steps                     # 2 minutes, 2 cores
    python -m recipes.benchmarks.steps --model smollm2     # a real model, with random tokens
    python -m recipes.benchmarks.steps --profile           # and by which operators a step is dearer

A prompt is read at once and cut to the budget. Then single tokens are decoded: a step of each
policy, and one of `DynamicCache` with sdpa over as many tokens as the budget, in the same rounds.
A policy without a budget (`full+int8`) holds as many.
The ratio is the median over rounds. Operators are those that torch runs in a step, model included;
calls are of functions of kvtool's. `--profile` adds, of each policy on the first number of threads,
the operators that take more time than in a step of the plain cache. It times them itself, which
makes every one of them slower.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import kvtool
from kvtool.generation import decode_step
from kvtool.models.load import load
from recipes.benchmarks.models import build_models, with_weights_of
from recipes.benchmarks.speed import dynamic_prompt, kvtool_prompt, median_ratio, time_steps

POLICIES = ["h2o", "h2o+caote", "roco", "tova", "snapkv", "keydiff", "rkv"]
MORE = ["h2o+int8", "h2o+calidrop", "rocketkv", "quest"]
WARM = 8
PROFILED = 20  # steps
SHOWN = 6  # operators of a policy
PACKAGE = str(Path(kvtool.__file__).parent)


@dataclass(frozen=True)
class Operator:
    """What an operator takes of a step, on average.

    Attributes:
        count: how often torch runs it.
        us: microseconds of its own, without the operators that it runs.
    """

    count: float = 0
    us: float = 0


@dataclass(frozen=True)
class Line:
    """A policy's step."""

    policy: str
    threads: int
    ms: float
    ratio: float
    operators: int
    calls: int
    profile: dict[str, Operator]


class _Operators(TorchDispatchMode):
    """Counts what torch is asked to do."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += 1
        return operation(*args, **(kwargs or {}))


def counted(step: Callable[[], object]) -> tuple[int, int]:
    """Operators of a step, and calls of kvtool's functions in another."""
    with _Operators() as operators:
        step()
    calls = 0

    def count(frame, event, _) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return operators.count, calls


def profiled(step: Callable[[], object]) -> dict[str, Operator]:
    """Operators of a step by name."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(PROFILED):
            step()
    return {
        event.key: Operator(event.count / PROFILED, event.self_cpu_time_total / PROFILED)
        for event in found.key_averages()
    }


def make_plain_step(plain, cache, token: torch.Tensor, length: int) -> Callable[[], object]:
    """A step over `length` tokens, after which the cache holds them again."""

    def step() -> None:
        plain(token[None], past_key_values=cache)
        cache.crop(length - cache.get_seq_length())

    return step


@torch.no_grad()
def measure(models, args: argparse.Namespace) -> list[Line]:
    """Each policy's steps in turn with those of the plain cache."""
    ours, plain = models
    ids = torch.randint(0, ours.config.vocab_size, (1, args.length))
    token = torch.tensor([7])
    lines = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        short = dynamic_prompt(plain, ids[:, : args.budget])
        steps = [make_plain_step(plain, short, token, args.budget)]
        for policy in args.policies:
            if kvtool.parse_policy(policy).takes_budget:
                cache = kvtool_prompt(ours, ids, policy, args.budget, "full")
            else:
                cache = kvtool_prompt(ours, ids[:, : args.budget], policy, None, "full")
            steps.append(lambda cache=cache: decode_step(ours, cache, token))
        theirs, *others = time_steps(steps, args.steps, WARM)
        names = ["DynamicCache", *args.policies]
        for name, step, taken in zip(names, steps, [theirs, *others], strict=True):
            ratio = median_ratio(taken, theirs)
            operators = profiled(step) if args.profile else {}
            ms = statistics.median(taken)
            lines.append(Line(name, threads, ms, ratio, *counted(step), operators))
    return lines


def models_of(name: str):
    """A model with kvtool's attention, and the same weights with sdpa."""
    if name == "random":
        return build_models()
    plain = load(name, dtype="float32").model
    plain.set_attn_implementation("sdpa")
    ours = with_weights_of(plain)
    return kvtool.attach(ours), plain


def show(lines: Sequence[Line], args: argparse.Namespace) -> None:
    """Print a row for each policy."""
    table = Table(title=f"{args.model}: a step at {args.budget} tokens", show_edge=False)
    table.add_column("cache")
    for threads in args.threads:
        table.add_column(f"ms, threads: {threads}", justify="right")
        table.add_column("ratio", justify="right")
    table.add_column("operators", justify="right")
    table.add_column("calls", justify="right")
    for name in dict.fromkeys(line.policy for line in lines):
        own = [line for line in lines if line.policy == name]
        cells = [cell for line in own for cell in (f"{line.ms:.1f}", f"{line.ratio:.2f}")]
        table.add_row(name, *cells, f"{own[0].operators}", f"{own[0].calls}")
    Console(width=140).print(table)


def show_profile(lines: Sequence[Line]) -> None:
    """Print the operators that make a step dearer than that of the plain cache, dearest first."""
    plain, *others = (line for line in lines if line.threads == lines[0].threads)
    table = Table(title="beyond a step of DynamicCache, the profiler's own time included")
    for name in ("cache", "operator", "times", "ms", "of all ms beyond it"):
        table.add_column(name, justify="left" if name in ("cache", "operator") else "right")
    for line in others:
        more = {}
        for name in line.profile.keys() | plain.profile.keys():
            ours = line.profile.get(name, Operator())
            theirs = plain.profile.get(name, Operator())
            more[name] = Operator(ours.count - theirs.count, ours.us - theirs.us)
        beyond = sum(each.us for each in more.values())
        for name in sorted(more, key=lambda name: -more[name].us)[:SHOWN]:
            each = more[name]
            shown = (f"{each.count:+.0f}", f"{each.us / 1e3:.2f}", f"{beyond / 1e3:.2f}")
            table.add_row(line.policy, name, *shown)
    Console(width=120).print(table)


def main(argv: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = "random (42 million parameters), smollm2 or a folder"
    parser.add_argument("--model", default="random", help=model)
    parser.add_argument("--length", type=int, default=2048, help="tokens of the prompt (2048)")
    parser.add_argument("--budget", type=int, default=512, help="tokens kept (512)")
    parser.add_argument("--steps", type=int, default=40, help="rounds (40)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--policies", nargs="+", default=[*POLICIES, *MORE])
    parser.add_argument("--profile", action="store_true", help="show operators as well")
    args = parser.parse_args(argv)
    before = torch.get_num_threads()
    try:
        lines = measure(models_of(args.model), args)
        show(lines, args)
        if args.profile:
            show_profile(lines)
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    main()
