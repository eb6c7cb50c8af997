"""Complete names of policies and of tasks in a shell, without importing torch."""

from __future__ import annotations

import re

from kvtool.policies.table import BASES, MODIFIERS


def complete_policies(incomplete: str) -> list[str]:
    """Return policies that begin as typed: `h2o,sn`, `h2o+ca`."""
    before, last = _parted(r"(.*[,+])?(.*)", incomplete)
    names = MODIFIERS if before.endswith("+") else BASES
    return [f"{before}{name}" for name in names if name.startswith(last)]


def complete_tasks(incomplete: str) -> list[str]:
    """Return tasks that begin as typed: `niah,ru`."""
    from kvtool.evaluation.tasks.table import TASKS

    before, last = _parted(r"(.*,)?(.*)", incomplete)
    return [f"{before}{name}" for name in TASKS if name.startswith(last)]


def _parted(pattern: str, text: str) -> tuple[str, str]:
    found = re.fullmatch(pattern, text, re.DOTALL)
    return (found[1] or "", found[2]) if found else ("", text)


COMPLETIONS = {"policy": complete_policies, "tasks": complete_tasks}
"""What completes an option, by its setting."""
