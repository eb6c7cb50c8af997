"""Scores from outside the package that a file names, which are never imported for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from kvtool.errors import UsageError


def check_imported(choices: Sequence[Any], where: str, what: str = "a run or a plan") -> None:
    """Refuse scores from outside the package that nobody has imported.

    Args:
        choices: policies as they stand in a document, strings or mappings.
        where: they stand, for the error.
        what: document names them, for the error.

    Raises:
        UsageError: the first such score.
    """
    from kvtool.policies.outside import named_parts

    for choice in choices:
        name = choice.get("name") if isinstance(choice, dict) else choice
        for module, score in named_parts(name) if isinstance(name, str) else []:
            # a module that is there may import others when it is asked for a name of its own
            if score not in vars(sys.modules.get(module) or object):
                raise UsageError(
                    f"`{where}` names policy `{name}`, and what {what} names is not imported",
                    hint=f"--policy '{name}' imports it",
                )
