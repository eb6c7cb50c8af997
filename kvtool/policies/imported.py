"""Scores from outside the package that a run or a plan names, which are never imported for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from kvtool.errors import UsageError


def check_imported(choices: Sequence[Any], where: str) -> None:
    """Refuse scores from outside the package that nobody has imported.

    Args:
        choices: policies as they stand in a document, strings or mappings.
        where: they stand, for the error.

    Raises:
        UsageError: the first such score.
    """
    from kvtool.policies.outside import module_of

    for choice in choices:
        name = choice.get("name") if isinstance(choice, dict) else choice
        module = module_of(name) if isinstance(name, str) else None
        if module is not None and module not in sys.modules:
            raise UsageError(
                f"`{where}` names policy `{name}`, and what a run or a plan names is not imported",
                hint=f"--policy '{name}' imports it",
            )
