"""Answer everything about a GPU that this project has to know, in commands of ten minutes.

With a quarter of an hour of a GPU, see the plan, run it, mend what it finds, and run it again:

    python -m recipes.benchmarks.gpu --json runs/device.json           # 9 min a call, a GPU
    python -m recipes.benchmarks.gpu --plan

Each call goes on where the last one stopped: what was found to be right is not measured again, what
failed is. Results are written after every case. Parts, in their order, the first three within five
minutes; of those from `kernels` on, cases that measure no time run first, as many at once as
`--jobs` says. What an H200 is to reach stands in a table of aims.

    pays      16 x 32K and 8 x 100K of an 8B shape beside the full cache: tokens/s and memory
    speed     steps of one row, captured and eager, and answers as a user has them
    prompts   blocks, whole prompts and profiles beside plain forwards
    compiled  compiled steps of one row, a minute of compiling each
    kernels   every Triton kernel against plain torch, its time, and the tests for GPUs
    right     every policy and modifier: tokens and kept positions as on the CPU, memory given back
    memory    bytes held and at the peak, against the forecast and against plan-budget
    waits     many prompts, other whole prompts, CaliDrop, further compiled steps
    model     trains the bundled model's recipe; only by name, in --work, for as long as --minutes

The exit code is 0 when all is measured and right, 1 where a case is wrong or failed, 3 where the
time was up before the last case. On a CPU, `--device cpu --tiny` runs all of it in small.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from recipes.benchmarks.gpu import aims, ran
from recipes.benchmarks.gpu.results import GOOD, Case, Results, machine, run_case, write_whole
from recipes.benchmarks.gpu.settings import FIRST, PARTS, Settings

BY_NAME = ("model",)  # not part of a run that names no part, but of a tiny one
START = 10  # seconds until a worker measures
GRACE = 25  # seconds that a case may go on after the time is up
BROKEN = 75  # a worker's exit code where the device cannot go on
MOST_JOBS = 12  # each holds half a GiB of the device before it has measured anything
DEFAULT = Path("runs/device.json")


def make_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="only this; may be repeated")
    parser.add_argument("--minutes", type=float, default=9, help="of this call (9)")
    parser.add_argument("--json", type=Path, default=DEFAULT, help=f"results ({DEFAULT})")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu (cuda)")
    parser.add_argument("--jobs", type=int, help="cases at once that measure no time (most cores)")
    parser.add_argument("--tiny", action="store_true", help="everything in small")
    parser.add_argument("--work", type=Path, help="of what outlives a call (beside the results)")
    parser.add_argument("--again", action="store_true", help="measure what is there once more")
    parser.add_argument("--show", action="store_true", help="print the tables and measure nothing")
    parser.add_argument("--plan", action="store_true", help="print what runs in which minute")
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)  # of a worker
    parser.add_argument("--share", help=argparse.SUPPRESS)  # of a worker: I/N, or alone
    return parser


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Options with their defaults; mistakes end the program."""
    parser = make_parser()
    args = parser.parse_args(argv)
    kind = args.device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        parser.error(f"--device {args.device}: choose cpu, cuda or cuda:1")
    args.show = args.show or args.plan
    if kind == "cuda" and not torch.cuda.is_available() and not args.show:
        parser.error("no CUDA device is there; --device cpu --tiny runs everything in small")
    if kind == "cpu" and not args.tiny and not args.show:
        parser.error("a CPU runs this in small only: add --tiny")
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes}: more than 0")
    if args.jobs is None:
        args.jobs = 1 if kind == "cpu" else min(MOST_JOBS, os.cpu_count() or 1)
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: at least 1")
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
        part = import_module(f"recipes.benchmarks.gpu.{name}")
        for case in share_of(part.cases(settings), args.share):
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


def share_of(cases: Iterable[Case], share: str | None) -> list[Case]:
    """Choose a worker's cases: all, those that run alone, or each N-th of those beside others."""
    if share is None:
        return list(cases)
    if share == "alone":
        return [case for case in cases if not case.beside]
    first, count = map(int, share.split("/"))
    return [case for case in cases if case.beside][first::count]


# ---- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts, print their tables and return the exit code."""
    args = read_options(argv)
    if args.deadline is not None:
        return work(args)
    if args.plan:
        return show_plan(args)
    results = open_results(args)
    if not args.show:
        results.save()
        _drive(args)
        args.again = False
        results = open_results(args)
    return show(results, args)


def _drive(args: argparse.Namespace) -> None:
    """Start workers, one after another, until all is measured or the time is up."""
    deadline = time.time() + 60 * args.minutes
    options = ["--device", args.device, "--work", args.work, "--deadline", deadline]
    options += ["--tiny"] if args.tiny else []
    command = [sys.executable, "-m", "recipes.benchmarks.gpu", *map(str, options)]
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    if args.device == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    threads = {"OMP_NUM_THREADS": f"{max(1, (os.cpu_count() or 1) // args.jobs)}"}
    for names, beside in stages(args):
        wanted = [*command, *(each for name in names for each in ("--part", name)), "--json"]
        if not beside:
            alone = ["--share", "alone"] if args.jobs > 1 and names[0] not in FIRST else []
            _keep_running([[*wanted, str(args.json), *alone]], environment, deadline)
            continue
        shares = {args.json.with_name(f"{args.json.name}.{i}"): i for i in range(args.jobs)}
        for file in shares:
            shutil.copy(args.json, file)
        workers = [
            [*wanted, str(file), "--share", f"{i}/{args.jobs}"] for file, i in shares.items()
        ]
        try:
            _keep_running(workers, environment | threads, deadline)
        finally:
            gather(args.json, list(shares))


def stages(args: argparse.Namespace) -> list[tuple[list[str], bool]]:
    """Return which parts run after one another, and whether as many cases at once as `--jobs`."""
    if args.jobs == 1:
        return [(args.part, False)]
    first, others = (
        [name for name in args.part if (name in FIRST) == own] for own in (True, False)
    )
    found = [(first, False), (others, True), (others, False)]
    return [(names, beside) for names, beside in found if names]


def _keep_running(commands: list[list[str]], environment: dict[str, str], deadline: float) -> None:
    """Run workers beside one another, those that die anew, to their ends or until the time is up.

    All are ended where this command is interrupted or ended.
    """

    def start(command: list[str]) -> None:
        running[subprocess.Popen(command, env=environment, start_new_session=True)] = command

    running: dict[subprocess.Popen, list[str]] = {}
    try:
        for command in commands:
            start(command)
        while running and time.time() < deadline + GRACE:
            time.sleep(0.1)
            for worker in [each for each in running if each.poll() is not None]:
                command = running.pop(worker)
                if worker.returncode:
                    code = worker.returncode
                    print(f"a case has ended its process (exit code {code})", file=sys.stderr)
                    if time.time() < deadline:
                        start(command)
    finally:
        for worker in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def gather(whole: Path, shares: Sequence[Path]) -> None:
    """Move what workers found in files of their own into the file of all."""
    results = json.loads(whole.read_text())
    before = copy.deepcopy(results["parts"])
    for file in shares:
        for name, records in json.loads(file.read_text())["parts"].items():
            known = before.get(name, {})
            found = {key: each for key, each in records.items() if known.get(key) != each}
            results["parts"].setdefault(name, {}).update(found)
    write_whole(whole, results)
    for file in shares:
        file.unlink()


def show_plan(args: argparse.Namespace) -> int:
    """Print the minutes that parts take, by the seconds of cases in the newest run of a GPU.

    A case that it has not measured counts as its estimate, or as the middle one of its part.
    """
    (known,) = [run["parts"] for run in ran.runs() if run["machine"]["kind"] == "cuda"][:1] or [{}]
    settings = Settings(args.device, args.tiny, 0, args.work)
    wanted = {
        name: list(import_module(f"recipes.benchmarks.gpu.{name}").cases(settings))
        for name in args.part
    }
    table = Table(title=f"minutes, with --jobs {args.jobs}", show_edge=False)
    for column in ("from", "to", "part", "cases", "measured before"):
        table.add_column(column, justify="left" if column == "part" else "right")
    now, asked = 0.0, {}
    whole = {key: each for records in known.values() for key, each in records.items()}
    for names, beside in stages(args):
        now += START / 60
        for name in names:
            records = whole | known.get(name, {})
            chosen = [case for case in wanted[name] if args.jobs == 1 or case.beside == beside]
            own = known.get(name, {}).values()
            middle = statistics.median([each["seconds"] for each in own] or [0])
            end = now
            for case in chosen:
                seconds = records.get(case.key, {}).get("seconds", case.seconds or middle)
                end += seconds / 60 / (args.jobs if beside else 1)
                asked[name, case.key] = end
            before = sum(case.key in records for case in chosen)
            label = f"{name}, {args.jobs} at once" if beside else name
            if chosen:
                table.add_row(f"{now:.1f}", f"{end:.1f}", label, f"{len(chosen)}", f"{before}")
            now = end
    console = Console(width=140)
    console.print(table)
    console.print()
    console.print(aims.table(known, asked))
    return 0


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
        part, records = import_module(f"recipes.benchmarks.gpu.{name}"), results.records(name)
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
    if not about["tiny"]:
        console.print(aims.table(results.data["parts"]))
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
