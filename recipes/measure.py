"""Measure again what the documents say of the bundled model, and print their tables.

    python recipes/measure.py [NAME ..] [--folder runs/documents]

Each NAME below is a run of `kvtool eval` in a folder of its own; broken off, the same command goes
on. Without a name all are measured, one after the other. What the claims measure is not measured
again: their page has tables of its own. A table has a row for each policy and a column for each
task, with the scores at all budgets, ascending.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from kvtool.documents.results import ResultsDocument, TaskResult
from kvtool.evaluation.run.index import read_results_file
from kvtool.report import formats
from kvtool.report.variants import families, task_names

RECIPES = Path(__file__).parent
_TABLE = "full,streaming,tova,h2o,h2o+caote,roco,snapkv"
_CAM = "streaming,streaming+cam,h2o,h2o+cam,d2o(merge=v)"


def _recipe(name: str, *more: str) -> tuple[str, ...]:
    return (str(RECIPES / f"{name}.yaml"), *more)


_TURNS = _recipe("multi-turn", "-b", "256,512")
RUNS: dict[str, tuple[str, ...]] = {
    "results": (
        *("-t", "niah,ruler/niah_multikey_1,fidelity", "-p", _TABLE, "-b", "64,128,256"),
        "--shared-prefill",
    ),
    "cam": _recipe("claims/d2o", "-p", _CAM, "--unset", "claim"),
    "readers": _recipe("claims/rocketkv", "-p", "hsa,loki", "--unset", "claim"),
    "query-agnostic": _recipe("query-agnostic"),
    "reasoning": _recipe("reasoning"),
    "bits-and-budgets": _recipe("bits-and-budgets"),
    "turns": _TURNS,
    "turns-later": (*_TURNS, "--query-agnostic"),
    "turns-alone": (*_TURNS, "--query-agnostic", "--set", "eval.tasks.0.mode=scdq"),
    "d2o-plan": _recipe("d2o-plan"),
    "roco-fidelity": _recipe("roco-fidelity"),
}


def table(document: ResultsDocument) -> str:
    """Write the scores of a run: a row for each policy, a column for each task."""
    tasks = task_names(document)
    lines = [["policy", *tasks], ["---"] * (len(tasks) + 1)]
    for family in families(document):
        found = [[document.of(variant.name, task) for variant in family.variants] for task in tasks]
        lines.append([f"`{family.label}`", *(" / ".join(map(_score, each)) for each in found)])
    counts = sorted({result.n for result in document.results})
    budgets = dict.fromkeys(
        str(variant.budget) for variant in document.variants if variant.budget is not None
    )
    said = f"budgets {' / '.join(budgets)}; n = {', '.join(map(str, counts))}\n"
    return said + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _score(result: TaskResult | None) -> str:
    if result is None or result.value is None:
        return formats.MISSING
    return f"{result.value:.0f}" if result.best == 100 else f"{result.value:.2f}"


def main(arguments: list[str] | None = None) -> None:
    """Measure the runs that are named, and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--folder", type=Path, default=Path("runs/documents"))
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in RUNS]:
        parser.error(f"no run named {unknown[0]}; choose from {', '.join(RUNS)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or RUNS:
        folder = options.folder / name
        command = [sys.executable, "-m", "kvtool", "eval", *RUNS[name], "-o", str(folder), "-q"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        sys.stdout.write(f"\n## {name}\n\n{table(read_results_file(folder / 'results.json'))}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
