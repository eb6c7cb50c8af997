"""The folder that a run is written to."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

from kvtool.documents.files import check_name, expand
from kvtool.errors import UsageError
from kvtool.evaluation.comparison import Comparison
from kvtool.models.folder import REFERENCE

_FILES = (".json", ".yaml", ".yml", ".txt")


def is_named(comparison: Comparison, output: str | None) -> bool:
    """Return whether the user has named the folder of a run."""
    return output not in (None, "-") or comparison.recipe.output.dir is not None


def run_folder(comparison: Comparison, output: str | None) -> Path:
    """Return the folder of the run, once it is known that it can be one."""
    if output is not None and not output.strip():
        raise UsageError("--output is empty", hint="--output runs/NAME")
    recipe = comparison.recipe
    given = recipe.output.dir if output in (None, "-") else output
    if given is not None:
        folder = expand(given)
    else:
        model = Path(recipe.model.id or REFERENCE).name
        tasks = "+".join(dict.fromkeys(task.name.partition("/")[0] for task in comparison.tasks))
        name = recipe.name or f"{model}_{tasks}_{date.today()}"
        folder = Path("runs") / re.sub(r"[^A-Za-z0-9.+_-]", "_", name)
    check_name(folder, "--output")
    for variant in comparison.variants:
        check_name(Path(variant.folder), "--policy")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output: `{folder}` is a file, a run needs a folder")
    if folder.suffix.lower() in _FILES and not folder.exists():
        raise UsageError(
            f"--output is the folder of a run, `{folder}` looks like a file",
            hint=f"--output {folder.with_suffix('')}; to save what is printed, redirect it with >",
        )
    return folder
