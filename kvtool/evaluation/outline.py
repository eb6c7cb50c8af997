"""A comparison without its samples: what a dry run shows where the hub cannot be asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.evaluation.comparison import Comparison, run_folder
from kvtool.evaluation.tasks.selection import hub_data
from kvtool.models.folder import Unreachable, check_folder, check_hub, check_hub_data


@dataclass(frozen=True)
class Outline:
    """What is known of a comparison without the hub.

    Attributes:
        folder: of the run.
        missing: what the hub would have to give, in words.
    """

    comparison: Comparison
    folder: Path
    missing: str

    def describe(self) -> dict[str, Any]:
        """Return the recipe and the work, in which samples and memory are unknown."""
        return {
            **self.comparison.recipe.to_data(),
            "work": {
                "folder": str(self.folder),
                "memory": None,
                "variants": [variant.name for variant in self.comparison.variants],
                "tasks": [{"task": task.name, "samples": None} for task in self.comparison.tasks],
                "measurements": None,
            },
        }


def outline(comparison: Comparison, folder: str | None) -> Outline | None:
    """Outline a comparison whose model or data only the hub has; None where nothing is missing.

    Args:
        folder: of the run; None: that of the recipe, or one under `runs/` named after the work.

    Raises:
        UsageError: a model that is neither here nor on the hub, no folder of a run.
    """
    model = comparison.recipe.model
    check_folder(model.id)
    place = run_folder(comparison, folder)
    try:
        check_hub(model.id, model.revision)
    except Unreachable as error:
        return Outline(comparison, place, _memory_unknown(error))
    for name in hub_data(comparison.tasks):
        try:
            check_hub_data(name)
        except Unreachable as error:
            return Outline(comparison, place, _memory_unknown(error))
    return None


def _memory_unknown(error: KvtoolError) -> str:
    return f"samples and memory: unknown, {error.message}"
