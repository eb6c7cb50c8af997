"""Scores, rescores and selections from outside the package, while they run.

A mistake of their code ends in one line with its file and line, and numbers that would silently
choose other tokens are refused. The rest is found by `kvtool policies MODULE:CLASS --check`.
Parts of the package are not wrapped.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

from kvtool.errors import KvtoolError, PolicyError, in_one_line
from kvtool.lazy_torch import Tensor, torch
from kvtool.policies.evidence import AttentionRows
from kvtool.policies.numbers import Count, State
from kvtool.policies.slot_view import SlotView
from kvtool.policies.spelling import is_inside, part_name

_PACKAGE = Path(__file__).parents[1]
Part = TypeVar("Part")
Result = TypeVar("Result")


def guarded(part: Part) -> Part:
    """Return a part from outside as one whose hooks are guarded; others, and None, as they are."""
    return part if part is None or is_inside(type(part)) else cast(Part, Guarded(part))


class Guarded:
    """A score, rescore or selection from outside; what is no hook is asked of the part itself."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self._decoded: set[object] = set()  # hooks and layers whose first decoded token was seen

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy that is being made has no part yet
            raise AttributeError(name)
        return getattr(self._part, name)

    def observe(self, state: State, view: SlotView, rows: AttentionRows) -> None:
        self._run("observe", state, view, rows)

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        return self._ranked("importance", view, state, view, rows)

    def rescore(self, importance: Tensor, view: SlotView) -> Tensor:
        return self._ranked("rescore", view, importance, view)

    def order(self, importance: Tensor, view: SlotView, protected: Tensor | None) -> Tensor:
        return self._ranked("order", view, importance, view, protected)

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor | None:
        found = self._run("protected", state, view, evicted)
        return None if found is None else found.expand_as(view.positions)

    def from_hidden(self, hidden: Tensor, layer: int) -> State:
        return cast(State, self._run("from_hidden", hidden, layer))

    def _run(self, hook: str, *shown: Any) -> Any:
        """Run a hook, which may write into its statistics and put none in another's place."""
        call = getattr(self._part, hook)
        if torch.compiler.is_compiling():
            return call(*shown)
        kept = [MappingProxyType(each) if isinstance(each, dict) else each for each in shown]
        with torch.no_grad():
            return run_hook(self._part, hook, lambda: call(*kept))

    def _ranked(self, hook: str, view: SlotView, *shown: Any) -> Tensor:
        """Run a hook that gives each slot a number; refuse a shape that would be spread over them.

        The numbers are looked at for every block of a prompt and the first decoded token behind it.
        """
        found = self._run(hook, *shown)
        if torch.compiler.is_compiling():
            return cast(Tensor, found)
        batch, heads, slots = view.positions.shape
        if getattr(found, "shape", None) not in ((batch, 1, slots), (batch, heads, slots)):
            right = f"({batch}, 1 or {heads}, {slots}): batch, KV heads, slots"
            raise fault(self._part, hook, f"returns {_kind_of(found)}, not {right}")
        if self._is_new(hook, view):
            wrong = ~found.isfinite() & (view.positions >= 0)
            if bool(wrong.any()):
                first = found.expand_as(wrong)[wrong][0].item()
                raise fault(self._part, hook, f"returns {first} for a token that is stored")
        return cast(Tensor, found)

    def _is_new(self, hook: str, view: SlotView) -> bool:
        if not isinstance(view.block, int) or view.block > 1:
            self._decoded.clear()
            return True
        seen = (hook, view.layer if isinstance(view.layer, int) else None)
        new = seen not in self._decoded
        self._decoded.add(seen)
        return new


def run_hook(part: object, hook: str, call: Callable[[], Result]) -> Result:
    """Run what an author wrote, and report what it raises in one line.

    Raises:
        PolicyError: anything that the author's code raised, or that it tried to exit.
    """
    try:
        return call()
    except (KvtoolError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        message = f"{hook} raised {in_one_line(error)} {_raised_at(part, hook, error)}"
        raise PolicyError(f"{part_label(part)}: {message}") from error


def fault(part: object, hook: str, message: str, hint: str | None = None) -> PolicyError:
    """Make the error of a hook or declaration that is wrong, with its file and line."""
    return PolicyError(f"{part_label(part)}: {hook} {message} ({_place(part, hook)})", hint=hint)


def part_label(part: object) -> str:
    """Return a part's module and class; of one of the package its name."""
    cls = type(part)
    return part_name(part) if is_inside(cls) else f"{cls.__module__}:{cls.__qualname__}"


def _kind_of(value: object) -> str:
    """Say what was returned in place of what should have been."""
    shape = getattr(value, "shape", None)
    return repr(value)[:60] if shape is None else f"a tensor of shape {tuple(shape)}"


def _place(part: object, hook: str) -> str:
    """Return the file and line of a hook as its author wrote it, or else of its class."""
    cls = type(part)
    code = getattr(inspect.unwrap(getattr(cls, hook, cls)), "__code__", None)
    if code is not None and _is_theirs(code.co_filename):
        return f"{Path(code.co_filename).name}, line {code.co_firstlineno}"
    try:
        return f"{Path(inspect.getfile(cls)).name}, line {inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return f"in {cls.__module__}"


def _raised_at(part: object, hook: str, error: BaseException) -> str:
    """Return the last line of the author's own code that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [each for each in frames if _is_theirs(each.filename)]
    if not theirs:
        return f"({_place(part, hook)})"
    own = getattr(inspect.getmodule(type(part)), "__file__", None)
    last = ([each for each in theirs if each.filename == own] or theirs)[-1]
    return f"({Path(last.filename).name}, line {last.lineno})"


def _is_theirs(filename: str) -> bool:
    """Return whether a file is neither kvtool's nor installed beside it."""
    path = Path(filename)
    return _PACKAGE not in path.parents and "site-packages" not in path.parts
