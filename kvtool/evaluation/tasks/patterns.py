"""Names of tasks, suites and globs, and the tasks that they stand for."""

from __future__ import annotations

import fnmatch


def covers(pattern: str, task: str) -> bool:
    """Match a task with a task, a suite or a glob.

    >>> covers("ruler", "ruler/vt"), covers("ruler/niah_*", "ruler/vt")
    (True, False)
    """
    return fnmatch.fnmatch(task, pattern) or task.startswith(f"{pattern}/")
