"""What has been run on which device, from the files in `recipes/benchmarks/results`.

python -m recipes.benchmarks.gpu.ran  # prints the table of recipes/benchmarks/README.md
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from recipes.benchmarks.gpu.results import KIND, Record
from recipes.benchmarks.gpu.settings import PARTS

FOLDER = Path(__file__).parents[1] / "results"


def runs(folder: Path = FOLDER) -> list[Record]:
    """Return the runs that are kept, those of GPUs first."""
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    kept = [run for run in found if run.get("kind") == KIND]
    return sorted(kept, key=lambda run: run["machine"]["kind"] != "cuda")


def lines(kept: list[Record]) -> list[str]:
    """Return the rows of a Markdown table: a run each, and that there is none on a GPU."""
    rows = [f"| device | versions | {' | '.join(PARTS)} |", "|---" * (2 + len(PARTS)) + "|"]
    for run in kept:
        about = run["machine"]
        device = f"{about['device']}{', in small' if about['tiny'] else ''}"
        versions = f"torch {about['torch']}, transformers {about['transformers']}"
        parts = " | ".join(_counts(run["parts"].get(part, {})) for part in PARTS)
        rows.append(f"| {device} | {versions}, Python {about['python']} | {parts} |")
    if not any(run["machine"]["kind"] == "cuda" for run in kept):
        rows.append(f"| any GPU | - | {' | '.join(['not run'] * len(PARTS))} |")
    return rows


def _counts(records: dict[str, Record]) -> str:
    states = Counter(record["state"] for record in records.values())
    named = (f"{states[state]} {state}" for state in sorted(states))
    return ", ".join(named) or "not run"


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines(runs())) + "\n")
