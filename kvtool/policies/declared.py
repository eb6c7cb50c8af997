"""Check what a score from outside declares, before it runs: a misspelt name would do nothing."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import Any, cast, get_args

from kvtool.errors import UsageError, did_you_mean
from kvtool.maths.columns import COLUMNS
from kvtool.policies.allocate.head_split import HeadSplit
from kvtool.policies.evicted.calidrop import CaliDrop
from kvtool.policies.evicted.eviction import Merging, SelectOnly
from kvtool.policies.guard import fault, part_label, run_hook
from kvtool.policies.numbers import PROMPT, SHIFT
from kvtool.policies.parts import Allocator, Evidence, Pace, Positions, Read, Score
from kvtool.policies.spelling import is_inside

_SWITCHES = ("attention", "keeps_prompt", "distinct", "sees_projection", "sees_hidden")
_DECLARED: dict[str, tuple[Any, ...]] = {  # what each may be, or the classes of that
    "evidence": tuple(Evidence),
    "when": ("always", "prompt", "never"),
    "layer_tokens": ("own", "nested", "same"),
    "positions": get_args(Positions),
    **dict.fromkeys(("window", "min_budget"), (int,)),
    **dict.fromkeys(_SWITCHES, (True, False)),
    "allocator": (None, Allocator),
    "head_split": (None, HeadSplit),
    "pace": (None, Pace),
    "evicted": (None, Merging, CaliDrop, SelectOnly),
    "reader": (None, Read),
}
_ROOTS = frozenset(Score.__mro__)  # beyond these, a class goes on from a score of the package


def check_class(cls: Any, name: str) -> None:
    """Refuse a class that makes no score that a policy can have.

    Args:
        name: as it was typed.

    Raises:
        UsageError: it is another class, no frozen dataclass, has no name or `importance`, or has a
            setting without a default.
    """
    dataclass = getattr(cls, "__dataclass_params__", None)
    if not isinstance(cls, type) or not issubclass(cls, Score) or cls is Score:
        wrong = "it is no class under Score"
    elif dataclass is None or not dataclass.frozen:
        wrong = "it is no frozen dataclass"
    elif not isinstance(getattr(cls, "name", None), str) or not cls.name:
        wrong = "it has no `name`"
    elif cls.importance is Score.importance:
        wrong = "it has no `importance`"
    elif cls.evidence is Evidence.LOGITS:
        wrong = "it goes by logits, and only sirllm does"
    elif bare := [each.name for each in fields(cast(Any, cls)) if each.default is MISSING]:
        wrong = f"its setting `{bare[0]}` has no default value"
    else:
        return
    raise UsageError(
        f"`{name}` is no score: {wrong}",
        hint="a score is a frozen dataclass under kvtool.policies.parts.Score",
    )


def check_declared(score: Score) -> None:
    """Refuse declarations of a score from outside that would be misread or do nothing.

    Raises:
        UsageError: its class makes no score.
        PolicyError: the first such declaration.
    """
    if is_inside(type(score)):
        return
    check_class(type(score), part_label(score))
    for name, allowed in _DECLARED.items():
        _check(score, name, allowed)
    _check_statistics(score)
    _check_called(score, "observe", "evidence is ALL_ROWS", score.evidence is Evidence.ALL_ROWS)
    _check_called(score, "from_hidden", "`sees_hidden` is true", score.sees_hidden)
    if getattr(score, "draws", False) and not hasattr(score, "seed"):
        raise fault(score, "draws", "is true, and there is no setting `seed`", "seed: int = 0")


def _check_called(score: Score, hook: str, where: str, called: bool) -> None:
    """Refuse a hook that is never called, and one that is called and missing."""
    cls = type(score)
    made = getattr(cls, hook) is not getattr(Score, hook)
    goes_on = any(is_inside(base) for base in cls.__mro__ if base not in _ROOTS)
    if made and not called:
        raise fault(score, hook, f"is called only where {where}")
    if called and not made and not goes_on:
        raise fault(score, hook, f"is missing, and it is called where {where}")


def _check_statistics(score: Score) -> None:
    names, sums = score.statistics, score.evidence is Evidence.COLUMNS
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        message = f"are {names!r}, not a tuple of names"
        raise fault(score, "statistics", message, f'statistics: ClassVar = ("{COLUMNS[0]}",)')
    if not names and (sums or score.sees_hidden):
        raise fault(score, "statistics", "are empty, and there is nothing to fill")
    for name in names:
        if name in (PROMPT, SHIFT) or names.count(name) > 1:
            raise fault(score, "statistics", f"name `{name}` twice, or as kvtool names its own")
        if sums and name not in COLUMNS:
            hint = did_you_mean(name, COLUMNS) or f"columns are {', '.join(COLUMNS)}"
            raise fault(score, "statistics", f"name `{name}`, which nobody sums", hint)


def _check(score: Score, name: str, allowed: tuple[Any, ...]) -> None:
    found = run_hook(score, name, lambda: getattr(score, name))
    if inspect.ismethod(found):
        raise fault(score, name, "is a method, and is read as a property", f"@property def {name}")
    if allowed == (int,):
        right, expected = type(found) is int and found >= 1, "a count of 1 or more"
    else:
        right = any(isinstance(found, a) if isinstance(a, type) else found == a for a in allowed)
        expected = f"one of {', '.join(getattr(a, '__name__', str(a)) for a in allowed)}"
    if not right:
        raise fault(score, name, f"is {found!r}, not {expected}")
