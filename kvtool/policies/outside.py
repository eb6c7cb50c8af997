"""Classes from outside the package, named `my_package.my_module:MyScore` where they are asked for.

A name on the command line or in Python is imported. A name in a file that a user may have received
(a recipe, a plan, a run, a saved cache) never is: it is looked up among the modules that are
imported already.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from kvtool.errors import KvtoolError, UsageError, did_you_mean, in_one_line, quote
from kvtool.policies.declared import check_class
from kvtool.policies.parts import Score
from kvtool.policies.spelling import read_settings, split_outside

_NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")


def is_outside(name: str) -> bool:
    """Return whether a base is named by its module: `my_package.my_module:MyScore`."""
    return ":" in name


def module_of(policy: str) -> str | None:
    """Return the module that a policy string names its base by, None where it names none."""
    match = _NAME.match(policy.lstrip())
    return None if match is None else match[1]


def named_parts(policies: str) -> list[tuple[str, str]]:
    """Return module and class of each score that a policy string, or a list of them, names so.

    >>> named_parts("h2o, my_module:Mine(recent=2)+caote")
    [('my_module', 'Mine')]
    """
    parts = [part for text in split_outside(policies, ",") for part in split_outside(text, "+")]
    found = [_NAME.match(part.lstrip()) for part in parts]
    return [(match[1], match[2]) for match in found if match is not None]


def build_outside(name: str, arguments: str, *, imports: bool) -> Score:
    """Make a score whose class is named by its module.

    Args:
        name: case-sensitive, `my_package.my_module:MyScore`.
        arguments: what its parentheses hold.
        imports: whether a module that is not imported yet may be.

    Raises:
        UsageError: no such module or class, one that is no score, an error while it is imported or
            made, a setting that it does not take.
    """
    cls = _find(name, Score, "policy", "--policy", imports)
    check_class(cls, name)
    try:
        made: Score = cls(**read_settings(name, cls, arguments))
    except KvtoolError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"`{name}` cannot be made: {in_one_line(error)}") from None
    return made


def own_class(name: str, base: type, *, what: str, option: str, imports: bool) -> Any:
    """Return a class of the user's own that is not a score, such as a task.

    Args:
        name: case-sensitive, `my_package.my_module:MyClass`.
        base: what it is under.
        what: it is called, for errors.
        option: the flag that imports it.

    Raises:
        UsageError: no such module or class, one of another kind, an error while it is imported.
    """
    found = _find(name, base, what, option, imports)
    if not isinstance(found, type) or not issubclass(found, base):
        raise UsageError(f"{what} `{name}` is no class under {base.__name__}")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise UsageError(f"{what} `{name}` lacks {missing}")
    return found


def _find(name: str, base: type, what: str, option: str, imports: bool) -> Any:
    match = _NAME.fullmatch(name)
    if not match:
        raise UsageError(
            f"cannot read {quote(name)} as a {what}",
            hint=f"a {what} of your own is named my_package.my_module:MyClass",
        )
    module = sys.modules.get(match[1])
    if imports:
        module, found = _imported(match[1], match[2])
    elif module is None:
        raise UsageError(
            f"{what} `{name}` is from a module that is not imported, and a file does not import it",
            hint=f"{option} '{name}' imports it, as `import {match[1]}` does in Python",
        )
    else:  # only looked at: a module may import others when it is asked for a name
        found = vars(module).get(match[2])
    if found is None:
        known = [
            each
            for each, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, base) and value is not base
        ]
        raise UsageError(
            f"module `{match[1]}` has no class `{match[2]}`", hint=did_you_mean(match[2], known)
        )
    return found


def _imported(name: str, wanted: str) -> tuple[ModuleType, Any]:
    """Return a module and what it has under a name, which may run code of its own again."""
    try:
        with _current_folder():
            module = import_module(name)
        return module, getattr(module, wanted, None)
    except (Exception, SystemExit) as error:
        lacks = error.name if isinstance(error, ModuleNotFoundError) else None
        if lacks is None or not f"{name}.".startswith(f"{lacks}."):
            raise UsageError(f"cannot import module `{name}`: {in_one_line(error)}") from None
        raise UsageError(
            f"no module named `{lacks}`",
            hint="modules are found in the current folder, on PYTHONPATH and where Python installs",
        ) from None


@contextmanager
def _current_folder() -> Iterator[None]:
    """Let modules of the current folder be found, behind all others, as `python -m` does."""
    folder = str(Path.cwd())
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
