"""The lm-evaluation-harness as a library: its tasks found, loaded and kept from talking.

https://github.com/EleutherAI/lm-evaluation-harness, from 0.4.12 on.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import random
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtool.errors import KvtoolError, UsageError, did_you_mean

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

_SEED = 1234  # of few-shot examples and numpy, where the harness' user names none
_LISTED = 20


@dataclass(frozen=True)
class Prepared:
    """A task of the harness with its requests by document."""

    task: Task
    documents: dict[int, list[Instance]]


@lru_cache(maxsize=64)
def prepare(
    name: str, include_path: str | None, fewshot: int | None, limit: int | None, seed: int
) -> Prepared:
    """Load a task and build the requests of its first `limit` documents.

    Args:
        seed: 0 gives the few-shot examples of the harness' own command line.

    Raises:
        UsageError: no such task, a group of tasks, one that kvtool cannot answer.
        KvtoolError: its data cannot be read, or the task fails otherwise.
    """
    manager = _manager_of(name, include_path)
    try:
        with contained(seed):
            task = next(iter(manager.load(name)["tasks"].values()))
            _set_shots(name, task, fewshot)
            task.set_fewshot_seed(_SEED + seed)
            task.build_all_requests(limit=limit)
    except KvtoolError:
        raise
    except Exception as error:  # any: a task of the harness is a program
        reason = " ".join(str(error).split()) or type(error).__name__
        offline = "its data set must be cached on this machine or reachable"
        raise KvtoolError(
            f"lm-eval/{name} cannot be prepared: {reason}",
            hint=offline if isinstance(error, OSError) else None,
        ) from error
    documents: dict[int, list[Instance]] = defaultdict(list)
    for instance in task.instances:
        documents[instance.doc_id].append(instance)
    return Prepared(task, dict(documents))


def _manager_of(name: str, include_path: str | None) -> TaskManager:
    """Return the task list that knows a name: one's own first, then the harness'."""
    folders = [None] if include_path is None else [include_path, None]
    if include_path is not None and not Path(include_path).is_dir():
        raise UsageError(f"include_path: folder `{include_path}` does not exist")
    known: list[str] = []
    for folder in folders:
        manager = _manager(folder)
        entry = manager.task_index.get(name)
        if entry is not None and entry.kind.name in ("GROUP", "TAG"):
            members = [f"lm-eval/{member}" for member in _members(manager, name)]
            listed = ",".join(members[:_LISTED]) + (",.." if len(members) > _LISTED else "")
            raise UsageError(f"lm-eval/{name} is a group of tasks", hint=f"its members: {listed}")
        if entry is not None:
            _check(name, entry.cfg or {})
            return manager
        known += manager.all_subtasks
    raise UsageError(
        f"the lm-evaluation-harness has no task `{name}`", hint=did_you_mean(name, known)
    )


@lru_cache(maxsize=8)
def _manager(folder: str | None) -> TaskManager:
    """Read the tasks of a folder, or the harness' own, which takes seconds."""
    from lm_eval.tasks import TaskManager

    with contained():
        return TaskManager(include_path=folder, include_defaults=folder is None)


def _members(manager: TaskManager, name: str) -> list[str]:
    """List the tasks of a group and of the groups in it."""
    entry = manager.task_index.get(name)
    if entry is None or entry.kind.name not in ("GROUP", "TAG"):
        return [name]
    listed = sorted(entry.tags) if entry.kind.name == "TAG" else entry.cfg["task"]
    names = [
        item if isinstance(item, str) else item.get("task", item.get("group")) for item in listed
    ]
    return [member for child in names for member in _members(manager, child)]


def _check(name: str, config: dict[str, Any]) -> None:
    if config.get("doc_to_image") or config.get("doc_to_audio"):
        raise UsageError(f"lm-eval/{name} shows pictures or plays sound, which kvtool does not")
    if config.get("unsafe_code"):
        raise UsageError(f"lm-eval/{name} runs code that the model writes, which kvtool does not")


def _set_shots(name: str, task: Task, fewshot: int | None) -> None:
    """Set the number of few-shot examples as the harness does: not where the task's own is 0."""
    own = task.get_config("num_fewshot")
    if fewshot is None:
        task.set_config("num_fewshot", own or 0)
    elif own == 0 and fewshot > 0:
        raise UsageError(f"lm-eval/{name} takes no examples, got fewshot {fewshot}")
    else:
        task.set_config("num_fewshot", fewshot)


@contextmanager
def contained(seed: int = 0) -> Iterator[None]:
    """Keep what the harness prints, logs and draws away from everyone else."""
    logger, one_process = logging.getLogger("lm_eval"), "DISABLE_MULTIPROC"
    level, states = logger.level, (random.getstate(), np.random.get_state())
    previous = os.environ.get(one_process)
    random.seed(seed)
    np.random.seed(_SEED + seed)
    logger.setLevel(logging.CRITICAL)
    os.environ[one_process] = "1"
    nowhere = io.StringIO()
    try:
        with warnings.catch_warnings(), redirect_stdout(nowhere), redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        random.setstate(states[0])
        np.random.set_state(states[1])
        os.environ.pop(one_process)
        if previous is not None:
            os.environ[one_process] = previous


def hash_of(document: Any) -> str:
    """Return what tells a document from others."""
    text = json.dumps(document, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
