"""Parts from outside the package, checked while they run: what they return, and what they touch.

A mistake ends in one line that names the part, the hook, and the file and line of its author.
Shapes and types are compared at every call, which costs no device sync. Values and writes are
looked at for every block of a prompt, and for the first decoded token behind it.
Parts of the package are not wrapped.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kvtool.errors import KvtoolError, PolicyError, did_you_mean, in_one_line
from kvtool.policies.parts import Rescore, Score, Select
from kvtool.policies.spelling import is_inside, part_name

if TYPE_CHECKING:
    from torch import Tensor

    from kvtool.policies.evidence import AttentionRows
    from kvtool.policies.numbers import Count, State
    from kvtool.policies.parts import SlotView

_PACKAGE = Path(__file__).parents[1]
Part = TypeVar("Part")
Result = TypeVar("Result")


def guarded_score(score: Score) -> Score:
    """Return a score that checks what its author wrote; one of the package as it is."""
    return score if is_inside(type(score)) else cast(Score, GuardedScore(score))


def guarded_rescore(rescore: Rescore) -> Rescore:
    """Return the same of a rescore."""
    return rescore if is_inside(type(rescore)) else cast(Rescore, GuardedRescore(rescore))


def guarded_select(select: Select) -> Select:
    """Return the same of a selection."""
    return select if is_inside(type(select)) else cast(Select, GuardedSelect(select))


def run_hook(part: object, hook: str, call: Callable[[], Result]) -> Result:
    """Run a hook of a part, and report what it raises in one line.

    Raises:
        PolicyError: anything that the author's code raised, or that it tried to exit.
    """
    if is_inside(type(part)):
        return call()
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
    """Make the error of a hook whose result or effect is wrong."""
    return PolicyError(f"{part_label(part)}: {hook} {message} ({_place(part, hook)})", hint=hint)


def part_label(part: object) -> str:
    """Return a part's module and class; of one of the package its name."""
    cls = type(part)
    return part_name(part) if is_inside(cls) else f"{cls.__module__}:{cls.__qualname__}"


class _Guarded:
    """A part from outside; what is not wrapped is asked of the part itself."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self._decoded: set[tuple[str, int | None]] = set()  # hooks and layers that were looked at

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy that is being made has no part yet
            raise AttributeError(name)
        return getattr(self._part, name)

    def _run(
        self,
        hook: str,
        call: Callable[[State], Result],
        view: SlotView,
        state: State,
        rows: AttentionRows | None = None,
    ) -> tuple[Result, bool]:
        """Run a hook; return what it gave, and whether its values are to be looked at, too."""
        import torch

        if torch.compiler.is_compiling():
            return call(state), False
        careful, shown = self._first(hook, view), dict(state)
        before = [_stamp(tensor) for _, tensor in _shown(view, rows)] if careful else []
        try:
            with torch.no_grad():
                found = run_hook(self._part, hook, lambda: call(shown))
        except PolicyError as error:
            raise self._with_names(error, state) from error.__cause__
        for name in shown.keys() | state.keys():
            if shown.get(name) is not state.get(name):
                self._refuse_rebound(hook, name, state)
        for (name, tensor), stamp in zip(_shown(view, rows) if before else (), before, strict=True):
            if _changed(stamp, tensor):
                raise fault(self._part, hook, f"writes into {name}, which is shown to be read only")
        return found, careful

    def _first(self, hook: str, view: SlotView) -> bool:
        """Return whether this is a block of a prompt, or a layer's first decoded token."""
        if not isinstance(view.block, int) or view.block > 1:
            self._decoded = {each for each in self._decoded if each[0] != hook}
            return True
        seen = (hook, view.layer if isinstance(view.layer, int) else None)
        if seen in self._decoded:
            return False
        self._decoded.add(seen)
        return True

    def _with_names(self, error: PolicyError, state: State) -> PolicyError:
        """Say which statistics there are, where another one was asked for."""
        cause = error.__cause__
        if not isinstance(cause, KeyError) or len(cause.args) != 1 or cause.args[0] in state:
            return error
        return PolicyError(error.message, hint=_statistics_hint(str(cause.args[0]), state))

    def _refuse_rebound(self, hook: str, name: str, state: State) -> None:
        if name in state:
            message = f'puts another tensor at state["{name}"], which is lost'
            hint = f'write into it in place: state["{name}"].add_(..)'
        else:
            message = f'puts a number of its own at state["{name}"], which is lost'
            hint = _statistics_hint(name, state)
        raise fault(self._part, hook, message, hint)

    def _check_numbers(
        self, hook: str, found: Any, view: SlotView, values: bool, **how: Any
    ) -> None:
        """Refuse a result of another kind, type or shape, and numbers of slots that are none."""
        import torch

        expected = view.positions.shape
        heads: Sequence[int] = how.get("heads", (1, expected[1]))
        dtype = how.get("dtype", torch.float32)
        if not isinstance(found, torch.Tensor):
            raise fault(self._part, hook, f"returns {kind_of(found)}, not a tensor")
        shape = tuple(found.shape)
        right = len(shape) == 3 and shape[0] == expected[0] and shape[2] == expected[2]
        if not right or shape[1] not in heads:
            named = " or ".join(dict.fromkeys(str(each) for each in heads))
            raise fault(
                self._part,
                hook,
                f"returns shape {shape}, not ({expected[0]}, {named}, {expected[2]}): "
                "batch, KV heads, slots",
            )
        if found.dtype != dtype:
            short = [str(each).removeprefix("torch.") for each in (found.dtype, dtype)]
            raise fault(self._part, hook, f"returns {short[0]} numbers, not {short[1]}")
        if found.device != view.positions.device:
            message = f"returns a tensor on {found.device}, and the slots are on "
            raise fault(self._part, hook, f"{message}{view.positions.device}")
        if values and dtype == torch.float32:
            wrong = ~found.isfinite() & (view.positions >= 0)
            if bool(wrong.any()):
                first = found.expand_as(wrong)[wrong][0].item()
                raise fault(self._part, hook, f"returns {first} for a token that is stored")


class GuardedScore(_Guarded):
    """A score from outside.

    Attributes:
        most_protected: the most tokens of a head that it has protected where that was looked at.
    """

    def __init__(self, score: Score) -> None:
        super().__init__(score)
        self.most_protected = 0

    def observe(self, state: State, view: SlotView, rows: AttentionRows) -> None:
        self._run("observe", lambda own: self._part.observe(own, view, rows), view, state, rows)

    def importance(self, state: State, view: SlotView, rows: AttentionRows | None) -> Tensor:
        found, values = self._run(
            "importance", lambda own: self._part.importance(own, view, rows), view, state, rows
        )
        self._check_numbers("importance", found, view, values)
        return cast("Tensor", found)

    def protected(self, state: State, view: SlotView, evicted: Count) -> Tensor | None:
        import torch

        found, values = self._run(
            "protected", lambda own: self._part.protected(own, view, evicted), view, state
        )
        if found is None:
            return None
        self._check_numbers("protected", found, view, False, dtype=torch.bool)
        if values:
            count = (found & (view.positions >= 0)).sum(-1, keepdim=True)
            self.most_protected = max(self.most_protected, int(count.max()))
            over = count - torch.as_tensor(view.budget, device=count.device)
            if int(over.max()) > 0:
                most = int(count.expand_as(over).flatten()[over.argmax()])
                message = f"marks {most} tokens of a head, {int(over.max())} more than its budget"
                hint = "count them in `reserved`, which refuses a budget that they would fill"
                raise fault(self._part, "protected", message, hint)
        return found.expand_as(view.positions)

    def from_hidden(self, hidden: Tensor, layer: int) -> State:
        import torch

        with torch.no_grad():
            found = run_hook(
                self._part, "from_hidden", lambda: self._part.from_hidden(hidden, layer)
            )
        if torch.compiler.is_compiling():
            return found
        named = self._part.statistics
        if not isinstance(found, dict) or not found or not found.keys() <= set(named):
            message = f"returns {kind_of(found)}, not numbers by name"
            raise fault(
                self._part, "from_hidden", message, f"its statistics are {', '.join(named)}"
            )
        for name, numbers in found.items():
            shape = tuple(numbers.shape) if isinstance(numbers, torch.Tensor) else ()
            batch, tokens = hidden.shape[:2]
            right = len(shape) == 3 and (shape[0], shape[2]) == (batch, tokens)
            if not right or numbers.dtype != torch.float32:
                message = (
                    f"returns {kind_of(numbers)} as `{name}`, "
                    f"not float32 numbers of shape ({batch}, KV heads, {tokens})"
                )
                raise fault(self._part, "from_hidden", message)
        return cast("State", found)

    def voters(self, first_layer_budget: int) -> int:
        found = run_hook(self._part, "voters", lambda: self._part.voters(first_layer_budget))
        if not is_count(found, 1):
            raise fault(self._part, "voters", f"returns {kind_of(found)}, not a count of 1 or more")
        return int(found)

    def vote_weights(self, rows: int, first_layer_budget: Count) -> Tensor | None:
        import torch

        found = run_hook(
            self._part, "vote_weights", lambda: self._part.vote_weights(rows, first_layer_budget)
        )
        if found is None or torch.compiler.is_compiling():
            return found
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else None
        if shape is None or len(shape) != 2 or shape[1] != rows:
            message = f"returns {kind_of(found)}, not weights of shape (batch or 1, {rows})"
            raise fault(self._part, "vote_weights", message)
        if not bool(found.isfinite().all()):
            raise fault(self._part, "vote_weights", "returns weights that are not finite")
        return found


class GuardedRescore(_Guarded):
    """A rescore from outside."""

    def rescore(self, importance: Tensor, view: SlotView) -> Tensor:
        found, values = self._run(
            "rescore", lambda _: self._part.rescore(importance, view), view, {}
        )
        self._check_numbers("rescore", found, view, values, heads=(view.positions.shape[1],))
        return cast("Tensor", found)


class GuardedSelect(_Guarded):
    """A selection from outside."""

    def order(self, importance: Tensor, view: SlotView, protected: Tensor | None) -> Tensor:
        found, values = self._run(
            "order", lambda _: self._part.order(importance, view, protected), view, {}
        )
        self._check_numbers("order", found, view, values, heads=(1,))
        return cast("Tensor", found)


def reserved_tokens(score: Score, budget: int) -> dict[str, int]:
    """Count the tokens that a score always keeps, by the name of the parameter that says so.

    Raises:
        PolicyError: a score from outside that names no counts.
    """
    found = run_hook(score, "reserved", lambda: score.reserved(budget))
    if is_inside(type(score)):
        return dict(found)
    if not isinstance(found, Mapping) or not all(is_count(each, 0) for each in found.values()):
        raise fault(score, "reserved", f"returns {kind_of(found)}, not counts by parameter name")
    return {str(name): int(count) for name, count in found.items()}


def is_count(value: object, least: int) -> bool:
    """Return whether a value is a whole number, and at least so much."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def kind_of(value: object) -> str:
    """Say what was returned in place of what should have been."""
    if value is None:
        return "None"
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__} of shape {tuple(shape)}"
    return repr(value)[:60] if isinstance(value, (int, float, str, dict)) else type(value).__name__


def _statistics_hint(name: str, state: State) -> str:
    if not state:
        return f'it declares no statistics; statistics: ClassVar = ("{name}",)'
    return did_you_mean(name, state) or f"its statistics are {', '.join(state)}"


def _shown(view: SlotView, rows: AttentionRows | None) -> Iterator[tuple[str, Tensor]]:
    """Name the tensors that a hook may read; what is decoded for it is a copy."""
    yield "view.positions", view.positions
    for name in ("values", "keys"):
        tensors = getattr(view, name)
        if isinstance(tensors, tuple):
            yield from ((f"view.{name}", tensor) for tensor in tensors)
    if rows is not None:
        yield "rows.weights", rows.weights


def _stamp(tensor: Tensor) -> int | Tensor:
    """Return what changes with a tensor: its version, or a copy where none is counted."""
    return tensor.clone() if tensor.is_inference() else tensor._version


def _changed(stamp: int | Tensor, tensor: Tensor) -> bool:
    return stamp != tensor._version if isinstance(stamp, int) else not bool((stamp == tensor).all())


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
    theirs = [
        each for each in traceback.extract_tb(error.__traceback__) if _is_theirs(each.filename)
    ]
    if not theirs:
        return f"({_place(part, hook)})"
    own = getattr(inspect.getmodule(type(part)), "__file__", None)
    last = ([each for each in theirs if each.filename == own] or theirs)[-1]
    return f"({Path(last.filename).name}, line {last.lineno})"


def _is_theirs(filename: str) -> bool:
    """Return whether a file is neither kvtool's nor installed beside it."""
    path = Path(filename)
    return _PACKAGE not in path.parents and "site-packages" not in path.parts
