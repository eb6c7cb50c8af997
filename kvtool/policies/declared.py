"""Check what a score from outside declares, before it runs: a misspelt name would do nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import partial
from typing import Any, cast, get_args

from kvtool.errors import did_you_mean
from kvtool.maths.columns import COLUMNS
from kvtool.policies.allocate.head_split import HeadSplit
from kvtool.policies.evicted.calidrop import CaliDrop
from kvtool.policies.evicted.eviction import Merging, SelectOnly
from kvtool.policies.guard import fault, is_count, run_hook
from kvtool.policies.numbers import PROMPT, SHIFT
from kvtool.policies.parts import Allocator, Evidence, Pace, Positions, Read, Score
from kvtool.policies.spelling import is_inside

_WHEN = ("always", "prompt", "never")
_LAYERS = ("own", "nested", "same")
_PARTS: dict[str, type | tuple[type, ...]] = {
    "allocator": Allocator,
    "head_split": HeadSplit,
    "pace": Pace,
    "evicted": (Merging, CaliDrop, SelectOnly),
    "reader": Read,
}


def is_score(value: Any) -> bool:
    """Return whether something is a class of scores."""
    return isinstance(value, type) and issubclass(value, Score) and value is not Score


def class_fault(cls: Any) -> str | None:
    """Say why a class makes no score that a policy can have, None if it does."""
    wrong = form_fault(cls)
    if wrong is None and cls.importance is Score.importance:
        return "it has no `importance`"
    return wrong


def form_fault(cls: Any) -> str | None:
    """Say why what a class declares cannot be read as a score's, None if it can."""
    if not is_score(cls):
        return "it is no class under Score"
    score: type[Score] = cls
    if not hasattr(cls, "__dataclass_params__") or not cls.__dataclass_params__.frozen:
        return "it is no frozen dataclass"
    if not isinstance(getattr(score, "name", None), str) or not score.name:
        return "it has no `name`"
    if score.evidence is Evidence.LOGITS:
        return "it goes by logits, and only sirllm does"
    for each in fields(cls):
        if each.default is MISSING:
            return f"its setting `{each.name}` has no default value"
    return None


_ROOTS = frozenset(Score.__mro__)  # beyond these, a class goes on from a score of the package


def check_declared(score: Score) -> None:
    """Refuse declarations of a score from outside that would be misread or do nothing.

    Raises:
        PolicyError: the first one.
    """
    if is_inside(type(score)):
        return
    _check_choice(score, "evidence", tuple(Evidence))
    _check_choice(score, "when", _WHEN)
    _check_choice(score, "layer_tokens", _LAYERS)
    _check_choice(score, "positions", get_args(Positions))
    _check_statistics(score)
    observes = type(score).observe is not Score.observe
    goes_on = any(is_inside(base) for base in type(score).__mro__ if base not in _ROOTS)
    if observes != (score.evidence is Evidence.ALL_ROWS) and (observes or not goes_on):
        message = "is called for Evidence.ALL_ROWS alone, and the evidence is"
        message = (
            f"{message} {score.evidence.name}" if observes else "is missing, and ALL_ROWS calls it"
        )
        raise fault(score, "observe", message)
    if getattr(score, "draws", False) and "seed" not in {
        each.name for each in fields(cast(Any, score))
    }:
        raise fault(score, "draws", "is true, and there is no setting `seed`", "seed: int = 0")
    _check(score, "window", lambda found: is_count(found, 1), "a count of 1 or more")
    _check(score, "min_budget", lambda found: is_count(found, 1), "a count of 1 or more")
    for name in ("attention", "keeps_prompt", "distinct", "sees_projection", "sees_hidden"):
        _check(score, name, lambda found: isinstance(found, bool), "true or false")
    _check_hidden(score)
    for name, kind in _PARTS.items():
        _check(score, name, partial(_is_part, kind), f"None or {_named(kind)}")
    head = run_hook(score, "by_head", score.by_head)
    if not isinstance(head, Score):
        raise fault(score, "by_head", f"returns {type(head).__name__}, not a score")


def _check_hidden(score: Score) -> None:
    made = type(score).from_hidden is not Score.from_hidden
    if made and not score.sees_hidden:
        hint = "sees_hidden: ClassVar = True"
        raise fault(score, "from_hidden", "is called with `sees_hidden` alone", hint)
    if score.sees_hidden and not made:
        raise fault(score, "from_hidden", "is missing, and `sees_hidden` calls it")
    if score.sees_hidden and not score.statistics:
        hint = 'statistics: ClassVar = ("promise",)'
        raise fault(score, "statistics", "are empty, and from_hidden fills them", hint)


def _check_statistics(score: Score) -> None:
    names = score.statistics
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        message = f"are {names!r}, not a tuple of names"
        raise fault(score, "statistics", message, f'statistics: ClassVar = ("{COLUMNS[0]}",)')
    for name in names:
        if name in (PROMPT, SHIFT) or names.count(name) > 1:
            why = "twice" if names.count(name) > 1 else "which is a name of kvtool's own"
            raise fault(score, "statistics", f"name `{name}`, {why}")
    if score.evidence is not Evidence.COLUMNS:
        return
    for name in names or ("",):
        if name not in COLUMNS:
            message = (
                f"name `{name}`, which nobody sums" if name else "are empty, and COLUMNS fills them"
            )
            hint = did_you_mean(name, COLUMNS) or f"columns are {', '.join(COLUMNS)}"
            raise fault(score, "statistics", message, hint)


def _check_choice(score: Score, name: str, choices: tuple[Any, ...]) -> None:
    found = getattr(score, name)
    if found not in choices:
        offered = ", ".join(str(each) for each in choices)
        raise fault(score, name, f"is {found!r}, not one of {offered}")


def check_count(part: Any, name: str) -> None:
    """Refuse a part from outside whose property is no count of 1 or more.

    Raises:
        PolicyError: it is none, or reading it fails.
    """
    if part is not None and not is_inside(type(part)):
        _check(part, name, lambda found: is_count(found, 1), "a count of 1 or more")


def _check(score: Any, name: str, right: Callable[[Any], bool], expected: str) -> None:
    found = run_hook(score, name, lambda: getattr(score, name))
    if inspect.ismethod(found):
        raise fault(score, name, "is a method, and is read as a property", f"@property def {name}")
    if not right(found):
        raise fault(score, name, f"is {found!r}, not {expected}")


def _is_part(kind: type | tuple[type, ...], found: Any) -> bool:
    return found is None or isinstance(found, kind)


def _named(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join(each.__name__ for each in kinds)
