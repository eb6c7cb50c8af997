"""List the benchmarks, or run some of them one after another.

    python -m recipes.benchmarks                # what there is, what it answers, how long it takes
    python -m recipes.benchmarks waits          # all tables of what a user waits for
    python -m recipes.benchmarks long calidrop  # these two

Each runs in a process of its own, with its own settings of the command line; nothing else should
run beside them.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parent
WAITS = {
    "startup": "",
    "steps": "",
    "reading": "",
    "calidrop": "",
    "speed": "--lengths 4096 --budgets 512 --policies h2o h2o+caote roco tova snapkv",
    "headline": "--tables turns decode whole",
    "serving": "",
    "profile": "",
    "long": "",
}  # in this order, with these arguments


@dataclass(frozen=True)
class Benchmark:
    """A module that can be run, as its docstring describes it."""

    name: str
    answers: str
    takes: str


def benchmarks() -> list[Benchmark]:
    """Read what every benchmark answers and how long it takes, without importing it."""
    found = []
    for file in sorted([*FOLDER.glob("*.py"), *FOLDER.glob("*/__main__.py")]):
        name = file.parent.name if file.stem == "__main__" else file.stem
        told = ast.get_docstring(ast.parse(file.read_text())) or ""
        command = f"python -m recipes.benchmarks.{name} "
        takes = [line.partition("# ")[2] for line in told.splitlines() if command in f"{line} "]
        if takes:
            found.append(Benchmark(name, told.splitlines()[0], takes[0]))
    return found


def main(names: list[str]) -> int:
    """Run the named ones, or list all."""
    known = benchmarks()
    if not names:
        table = Table("benchmark", "what it answers", "takes")
        for each in known:
            table.add_row(each.name, each.answers, each.takes)
        Console(width=110).print(table)
        print("python -m recipes.benchmarks NAME.. runs them; `waits` stands for", *WAITS)
        return 0
    runs = [(name, "") for name in names]
    if names == ["waits"]:
        runs = list(WAITS.items())
    if wrong := {name for name, _ in runs} - {each.name for each in known}:
        print(f"no such benchmark: {', '.join(sorted(wrong))}", file=sys.stderr)
        return 2
    codes = []
    for name, arguments in runs:
        print(f"==> {name} {arguments}".rstrip(), flush=True)
        program = [sys.executable, "-m", f"recipes.benchmarks.{name}", *arguments.split()]
        codes.append(subprocess.run(program, check=False).returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
