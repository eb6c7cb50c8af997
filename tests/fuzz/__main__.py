"""Try many inputs of every kind: `python -m tests.fuzz --cases 10000 --seed 7`."""

from __future__ import annotations

import argparse
import faulthandler
import resource
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

import torch

from tests.fuzz.contract import SECONDS, Outcome, run_case
from tests.fuzz.kinds import KINDS

_MEMORY = 8 * 2**30  # bytes that all cases together may ask for
_STUCK = 120  # seconds after which a case that cannot be broken off shows where it is


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help="names or parts of them, by comma")
    parser.add_argument("--only", type=int, help="run this one case and show what it says")
    options = parser.parse_args()
    torch.set_num_threads(1)
    limit_memory()
    wanted = [part for part in options.kinds.split(",") if part]
    rows, faults = [], 0
    for cls in KINDS:
        if wanted and not any(part in cls.name for part in wanted):
            continue
        with tempfile.TemporaryDirectory() as folder:
            outcomes = try_kind(cls, Path(folder), options.seed, options.cases, options.only)
        rows.append(row(cls.name, outcomes))
        faults += sum(outcome.verdict == "fault" for outcome in outcomes)
        print(" | ".join(map(str, rows[-1])), file=sys.stderr, flush=True)
    print(table(rows))
    return 1 if faults else 0


def limit_memory() -> None:
    """Let what would fill the machine fail instead, which is a fault of its case."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY, resource.RLIM_INFINITY))


def try_kind(
    cls: type, folder: Path, seed: int, cases: int, only: int | None = None
) -> list[Outcome]:
    """Run the cases of a kind; what breaks the contract is printed as it comes."""
    kind, outcomes = cls(folder), []
    told: Counter[str] = Counter()
    for index in range(cases) if only is None else [only]:
        case = kind.case(Random(f"{kind.name} {seed} {index}"))
        faulthandler.dump_traceback_later(_STUCK)
        outcome = run_case(case)
        faulthandler.cancel_dump_traceback_later()
        outcomes.append(outcome)
        if outcome.verdict != "fault" and outcome.seconds > SECONDS / 2:
            print(f"{kind.name} {seed} {index}: slow, {outcome.seconds:.1f} s", file=sys.stderr)
        if outcome.verdict == "fault" or only is not None:
            place = outcome.told.partition(":")[0] + outcome.told.partition(":")[2][:12]
            told[place] += 1
            if told[place] <= 3 or only is not None:
                print(f"{kind.name} {seed} {index}: {outcome.told}", file=sys.stderr, flush=True)
    return outcomes


def row(name: str, outcomes: list[Outcome]) -> list[str | int]:
    """Return what a line of the table holds."""
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    slowest = max((outcome.seconds for outcome in outcomes), default=0.0)
    largest = max((outcome.bytes for outcome in outcomes), default=0)
    counts = [verdicts[verdict] for verdict in ("success", "refused", "fault")]
    return [name, len(outcomes), *counts, f"{slowest:.2f} s", f"{largest / 2**20:.0f} MiB"]


def table(rows: list[list[str | int]]) -> str:
    """Return the table in Markdown."""
    head = ["kind", "cases", "successes", "refused in one line", "faults", "slowest", "largest"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
