"""Answer everything about a GPU that this project has to know, in commands of ten minutes.

With half an hour of a GPU, run this three times, and once more after mending what it finds:

    python -m tests.benchmarks.gpu --json runs/device.json           # 9 min a call, a GPU

Each call goes on where the last one stopped: what was found to be right is not measured again, what
failed is. Results are written after every case. Parts, in their order:

    kernels  every Triton kernel against plain torch, its time, and the tests for GPUs
    right    every policy and modifier: tokens and kept positions as on the CPU, memory given back
    memory   bytes held and at the peak, against the forecast and against plan-budget
    speed    decoding and prompts of an 8B shape; share of the possible gain, weights included
    waits    whole prompts, profiles, CaliDrop, eager steps, many prompts, beside their baselines
    model    trains the bundled model's recipe; only by name, in --work, for as long as --minutes

The exit code is 0 when all is measured and right, 1 where a case is wrong or failed, 3 where the
time was up before the last case. On a CPU, `--device cpu --tiny` runs all of it in small.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console
from transformers.utils import logging

from tests.benchmarks.gpu.results import GOOD, Results, machine, run_case
from tests.benchmarks.gpu.settings import Settings

PARTS = ("kernels", "right", "memory", "speed", "waits", "model")
BY_NAME = ("model",)  # not part of a run that names no part, but of a tiny one
GRACE = 25  # seconds that a case may go on after the time is up
BROKEN = 75  # a worker's exit code where the device cannot go on
DEFAULT = Path("runs/device.json")


def make_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="only this; may be repeated")
    parser.add_argument("--minutes", type=float, default=9, help="of this call (9)")
    parser.add_argument("--json", type=Path, default=DEFAULT, help=f"results ({DEFAULT})")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu (cuda)")
    parser.add_argument("--tiny", action="store_true", help="everything in small")
    parser.add_argument("--work", type=Path, help="of what outlives a call (beside the results)")
    parser.add_argument("--again", action="store_true", help="measure what is there once more")
    parser.add_argument("--show", action="store_true", help="print the tables and measure nothing")
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)  # of a worker
    return parser


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options with their defaults; mistakes end the program."""
    parser = make_parser()
    args = parser.parse_args(argv)
    kind = args.device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        parser.error(f"--device {args.device}: choose cpu, cuda or cuda:1")
    if kind == "cuda" and not torch.cuda.is_available() and not args.show:
        parser.error("no CUDA device is there; --device cpu --tiny runs everything in small")
    if kind == "cpu" and not args.tiny and not args.show:
        parser.error("a CPU runs this in small only: add --tiny")
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes}: more than 0")
    args.part = args.part or [part for part in PARTS if args.tiny or part not in BY_NAME]
    args.work = args.work or args.json.parent / "device-work"
    return args


def open_results(args: argparse.Namespace) -> Results:
    """Read the results so far; those of another machine end the program."""
    try:
        if args.show:
            return Results(args.json, _machine_of(args.json))
        return Results(args.json, machine(args.device, args.tiny), again=args.again)
    except json.JSONDecodeError as error:
        sys.exit(f"error: {args.json} is no whole JSON ({error}); name another file, or --again")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def _machine_of(path: Path) -> dict:
    return json.loads(path.read_text()).get("machine", {})


# ---- the worker, which runs cases in a process that they may end


def work(args: argparse.Namespace) -> int:
    """Run the cases that are missing, until the time is up."""
    settings = Settings(args.device, args.tiny, args.deadline, args.work)
    results = open_results(args)
    results.call = args.deadline
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    for name in args.part:
        part = import_module(f"tests.benchmarks.gpu.{name}")
        for case in part.cases(settings):
            if time.time() > settings.deadline:
                return 0
            if not results.wants(name, case.key, always=name in BY_NAME):
                continue
            print(f"{name}: {case.key}", file=sys.stderr, flush=True)
            record = run_case(results, name, case)
            if record is None or record["state"] not in GOOD:
                reason = (record or results.records(name)[case.key])["reason"]
                print(f"    {reason}", file=sys.stderr, flush=True)
            try:
                settings.wait()
            except Exception:  # the device's context is lost, and with it all that follows
                return BROKEN
        getattr(part, "release", lambda: None)()
    return 0


# ---- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts, print their tables and return the exit code."""
    args = read_options(argv)
    if args.deadline is not None:
        return work(args)
    results = open_results(args)
    if not args.show:
        results.save()
        _drive(args)
        args.again = False
        results = open_results(args)
    return show(results, args)


def _drive(args: argparse.Namespace) -> None:
    """Start workers, one after another, until one comes to its end or the time is up."""
    deadline = time.time() + 60 * args.minutes
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    if args.device == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = ["--json", args.json, "--device", args.device, "--work", args.work]
    options += [each for part in args.part for each in ("--part", part)]
    options += ["--deadline", f"{deadline}", *(["--tiny"] if args.tiny else [])]
    command = [sys.executable, "-m", "tests.benchmarks.gpu", *map(str, options)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    while time.time() < deadline:
        worker = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            code = worker.wait(deadline + GRACE - time.time())
        except subprocess.TimeoutExpired:
            return
        finally:  # also where this command is interrupted or ended
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        if code == 0:
            return
        print(f"a case has ended its process (exit code {code})", file=sys.stderr)


def show(results: Results, args: argparse.Namespace) -> int:
    """Print the tables, what is wrong and what is left, and return the exit code."""
    console = Console(width=140)
    about = results.data["machine"]
    console.print(
        f"{about['device']}; torch {about['torch']}, transformers {about['transformers']}, "
        f"Python {about['python']}{', in small' if about['tiny'] else ''}",
        highlight=False,
    )
    faults, left, sources = [], 0, set()
    settings = Settings(args.device, about["tiny"], 0, args.work)
    for name in args.part:
        part, records = import_module(f"tests.benchmarks.gpu.{name}"), results.records(name)
        console.print(f"\n[bold]{name}[/bold]: {part.TITLE}", highlight=False)
        for table in part.table(records, about):
            console.print(table)
        for case in part.cases(settings):
            record = records.get(case.key, {})
            state = record.get("state", "running")
            sources.add(record.get("source"))
            if state == "running":
                left += 1
            elif state == "skipped":
                console.print(f"skipped: {case.key}: {record['reason']}", highlight=False)
            elif state != "ok":
                faults.append(f"{state}: {name}: {case.key}: {record['reason']}")
    console.print()
    for line in faults:
        console.print(line, style="red", highlight=False, markup=False)
    if len(sources - {None}) > 1:
        console.print("some were measured before the source changed; --again measures all anew")
    if left:
        console.print(f"{left} cases are left: the same command goes on with them")
    if not faults and not left:
        console.print("all is measured and right")
    return 1 if faults else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
