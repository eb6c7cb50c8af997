"""Select the tasks of a run, and the settings of each from recipe and flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtool.documents.recipe import Recipe
from kvtool.documents.source import Source
from kvtool.documents.tree import DocumentError, Problem
from kvtool.errors import UsageError
from kvtool.evaluation.samples.data import PRESETS, Data
from kvtool.evaluation.tasks.table import expand, task_class
from kvtool.evaluation.tasks.task import Task, covers
from kvtool.extras import require

_HAYSTACK = "haystack"  # where the data of a task are named, the text that it hides things in


@dataclass(frozen=True)
class TaskFlags:
    """What flags set in every task that has such a setting.

    Attributes:
        values: by the name of the setting, such as `lengths`.
        data: a file or dataset by task, suite or glob; the text of `haystack` is for all tasks that
            hide something in one.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)


def read_tasks(flags: TaskFlags, recipe: Recipe, source: Source) -> tuple[list[Task], list[str]]:
    """Return the tasks of a recipe, their settings checked, and those left out for want of data.

    Raises:
        DocumentError: every task that is not known or given twice, every setting that is wrong.
        UsageError: no task that can run, flags that no task takes, a missing package.
    """
    if not recipe.eval.tasks:
        raise UsageError(
            "no tasks", hint="--tasks niah; suites: ruler, longbench, fidelity, ppl .."
        )
    settings = _Settings(flags)
    tasks: list[Task] = []
    left_out: list[str] = []
    problems: list[Problem] = []
    for i, entry in enumerate(recipe.eval.tasks):
        at = ("eval", "tasks", i)
        try:
            names = expand(entry.task)
        except UsageError as error:
            problems.append(source.problem((*at, "task"), str(error)))
            continue
        for name in names:
            try:
                kind = task_class(name, imports=True)
            except UsageError as error:
                problems.append(source.problem((*at, "task"), str(error)))
                continue
            given = {"name": name} | settings.of(kind, name)
            if "seed" not in entry.settings:
                given["seed"] = recipe.seed
            try:
                task = source.validate(kind, at=at, without=("task",), given=given)
            except DocumentError as error:
                problems += error.problems
                continue
            if name in (other.name for other in tasks):
                message = f"task `{name}` is given twice; one run holds each task once"
                problems.append(source.problem((*at, "task"), message))
            elif task.missing is None:
                tasks.append(task)
            elif len(names) == 1:
                problems.append(source.problem((*at, "task"), f"`{name}` needs {task.missing}"))
            else:
                left_out.append(name)
    if problems:
        raise DocumentError(list({str(problem): problem for problem in problems}.values()))
    settings.check_used()
    if not tasks:
        raise UsageError("none of these tasks can run without --data TASK=FILE")
    for task in tasks:
        if task.extra is not None:
            require(task.extra, needed_by=f"task `{task.name}`")
    return tasks, left_out


class _Settings:
    """Flags that set something in every task that has it."""

    def __init__(self, flags: TaskFlags) -> None:
        self._flags = {name: value for name, value in flags.values.items() if value is not None}
        self._data = flags.data
        self._used: set[str] = set()

    def of(self, kind: type[Task], name: str) -> dict[str, Any]:
        """Return what the flags set in a task."""
        fields = kind.model_fields
        given = {key: value for key, value in self._flags.items() if key in fields}
        self._used |= given.keys()
        for pattern, place in self._data.items():
            pattern = pattern or name  # a file alone is for every task that reads one
            field = _HAYSTACK if pattern == _HAYSTACK else "data"
            if field in fields and (field == _HAYSTACK or covers(pattern, name)):
                given[field] = place
                self._used |= {f"data {pattern}", "data "}
        return given

    def check_used(self) -> None:
        """Refuse flags that no task has taken."""
        for key in self._flags:
            if key not in self._used:
                raise UsageError(f"none of these tasks takes --{key}")
        for pattern in self._data:
            if f"data {pattern}" not in self._used:
                named = f"{pattern}=.." if pattern else "FILE"
                raise UsageError(f"--data {named}: no such task in this run, or it takes no data")


def parse_data(texts: Sequence[str]) -> dict[str, str]:
    """Read `TASK=FILE|HUB_ID` flags; a file that is there needs no task, whose name is empty then.

    Raises:
        UsageError: one of another form.
    """
    found = {}
    for text in texts:
        task, equals, place = text.partition("=")
        if not equals and Path(text).expanduser().is_file():
            found[""] = text
            continue
        if not equals or not task or not place:
            raise UsageError(
                f"--data must be TASK=FILE or TASK=HUB_ID, got `{text}`",
                hint="--data longbench/qasper=qasper.jsonl",
            )
        found[task.strip()] = place
    return found


def hub_data(tasks: list[Task]) -> list[str]:
    """Return the datasets that the hub is asked for, which takes long where there is no network."""
    names = []
    for task in tasks:
        if "data" not in type(task).model_fields:
            continue
        data: Data | None = getattr(task, "data", None)
        preset = PRESETS.get(task.name.partition("/")[0].removesuffix("_e"), {})
        name = data.hub if data else preset.get("hub")
        if name is not None and not Path(name).is_dir():
            names.append(name)
    return list(dict.fromkeys(names))
