"""Readers, merging, splits and codecs from outside the package, checked while they run.

They stay of their own kind, for which kvtool asks with `isinstance`. A guarded part is of a
subclass that runs each hook of its author, and looks at the result. Hooks that the author has taken
over from kvtool are not wrapped. Shapes and types are compared at every call; values and writes at
the first choice behind new tables, and at each cut of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from kvtool.maths.allocation import Allocation
from kvtool.policies.allocate.problem import AllocationProblem, Heads
from kvtool.policies.codec.codec import SCALE_BYTES, Codec
from kvtool.policies.evicted.eviction import Eviction
from kvtool.policies.guard import fault, is_count, kind_of, run_hook
from kvtool.policies.parts import Read
from kvtool.policies.read.rows import RowsChoice, RowsView
from kvtool.policies.read.view import Choice, ReadView, Stored
from kvtool.policies.spelling import is_inside

if TYPE_CHECKING:
    from torch import Tensor

Part = TypeVar("Part")


def guarded_part(part: Part) -> Part:
    """Return a part that checks what its author wrote; None and one of the package as they are."""
    if part is None or is_inside(type(part)):
        return part
    return _Guard(type(part)).of(part)


class _Guard:
    """The checks of one part, and of those that it makes of itself with other sizes.

    Attributes:
        cls: as its author wrote it.
        kind: the subclass that checks.
    """

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self._unseen = 0  # what was made and not looked at yet
        self._decoded: set[int] = set()  # layers with a decoded token that was looked at
        own = [name for name in _CHECKS if _is_theirs(cls, name)]
        if issubclass(cls, Read):
            own.append("start")  # which says that new tables are there to choose by
        checked = {name: self._checked(name) for name in own}
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        names |= {name: line for name, line in vars(cls).items() if name == "__firstlineno__"}
        copied = {"__reduce__": lambda part: (guarded_part, (_as(cls, part),))}
        self.kind = type(cls.__name__, (cls,), {**checked, **names, **copied})

    def of(self, part: Any) -> Any:
        """Return the part as one that checks."""
        return _as(self.kind, part)

    def expect(self) -> None:
        """Say that a further result comes whose values are to be looked at."""
        self._unseen += 1

    def is_new(self) -> bool:
        """Return whether a result is one of those."""
        new = self._unseen > 0
        self._unseen -= new
        return new

    def is_first(self, eviction: Eviction) -> bool:
        """Return whether this is a cut of a prompt, or a layer's first decoded token behind it."""
        if not eviction.decoded:
            self._decoded.discard(eviction.layer)
            return True
        seen = eviction.layer in self._decoded
        self._decoded.add(eviction.layer)
        return not seen

    def _checked(self, hook: str) -> Callable[..., Any]:
        theirs, check = getattr(self.cls, hook), _CHECKS[hook]

        @wraps(theirs)
        def run(part: Any, *shown: Any, **named: Any) -> Any:
            import torch

            if torch.compiler.is_compiling():
                return theirs(part, *shown, **named)
            found = run_hook(part, hook, lambda: theirs(part, *shown, **named))
            values = [*shown, *named.values()]
            return check(self, part, hook, found, *values)

        return run


def _is_theirs(cls: type, name: str) -> bool:
    owner = next((kind for kind in cls.__mro__ if name in vars(kind)), None)
    return owner is not None and not is_inside(owner)


def _as(kind: type, part: Any) -> Any:
    """Return the same part as one of another class."""
    new: Any = object.__new__(kind)
    for name, value in vars(part).items():
        object.__setattr__(new, name, value)
    return new


# ---- readers


def _sized(guard: _Guard, part: Any, hook: str, found: Any, *_: Any) -> Any:
    if not isinstance(found, Read):
        raise fault(part, hook, f"returns {kind_of(found)}, not a reader")
    return guard.of(found) if type(found) is guard.cls else found


def _start(guard: _Guard, part: Any, hook: str, found: Any, *shown: Any) -> Any:
    """Check tables, or what merging remembers: tensors whose first axis is the batch."""
    import torch

    first = shown[0]
    batch = first.keys.shape[0] if isinstance(first, Stored) else first
    if not isinstance(found, Mapping):
        raise fault(part, hook, f"returns {kind_of(found)}, not tensors by name")
    for name, table in found.items():
        if not isinstance(table, torch.Tensor) or table.dim() == 0 or table.shape[0] != batch:
            message = f"returns {kind_of(table)} as `{name}`, not a tensor with a row for each of "
            raise fault(part, hook, f"{message}{batch} batch entries")
        if isinstance(first, Stored) and table.device != first.keys.device:
            raise fault(part, hook, _elsewhere(f"`{name}`", table, first.keys))
    if isinstance(first, Stored) and first.keys.device.type != "meta":
        guard.expect()
    return found


def _columns(guard: _Guard, part: Any, hook: str, found: Any, *_: Any) -> Any:
    if not isinstance(found, Mapping) or not all(is_count(each, 0) for each in found.values()):
        raise fault(part, hook, f"returns {kind_of(found)}, not lengths by the name of a table")
    return found


def _choose(guard: _Guard, part: Any, hook: str, found: Any, view: ReadView) -> Any:
    if not isinstance(found, Choice):
        raise fault(part, hook, f"returns {kind_of(found)}, not a Choice")
    if not is_count(found.estimate, 0):
        raise fault(part, hook, f"has estimate {found.estimate!r}, not a count of numbers")
    _check_choice(guard, part, hook, found, view, view.tokens)
    return found


def _choose_rows(guard: _Guard, part: Any, hook: str, found: Any, view: RowsView) -> Any:
    if not isinstance(found, RowsChoice) or found.slots is None:
        raise fault(part, hook, f"returns {kind_of(found)}, not a RowsChoice with slots")
    for name in ("pairs", "estimate"):
        if len(getattr(found, name)) != view.query.shape[0]:
            raise fault(part, hook, f"has {name} of another number of rows than the batch")
    _check_choice(guard, part, hook, found, view, view.tokens.most, least=-1)
    return found


def _check_choice(
    guard: _Guard,
    part: Any,
    hook: str,
    found: Choice | RowsChoice,
    view: ReadView | RowsView,
    tokens: int,
    least: int = 0,
) -> None:
    _check_slots(part, hook, found.slots, view)
    given = _check_shares(part, hook, found, view)
    if view.query.device.type != "meta" and guard.is_new():
        if (slots := found.slots) is not None and slots.numel():
            low, high = int(slots.min()), int(slots.max())
            if low < least or high >= tokens:
                wrong = low if low < least else high
                raise fault(part, hook, f"has slot {wrong}, and there are 0 to {tokens - 1}")
        _check_finite(part, hook, given.items())


def _check_slots(part: Any, hook: str, slots: Any, view: ReadView | RowsView) -> None:
    """Refuse slots that are no indices for the heads, or for the queries, of a view."""
    import torch

    if slots is None:
        return
    batch, heads, group, _ = view.query.shape
    if not isinstance(slots, torch.Tensor) or slots.dtype != torch.int64:
        raise fault(part, hook, f"has slots that are {kind_of(slots)}, not an int64 tensor")
    if tuple(slots.shape[:-1]) not in ((batch, heads), (batch, heads, group)):
        message = f"not ({batch}, {heads}, ..) or ({batch}, {heads}, {group}, ..)"
        raise fault(part, hook, f"has slots of shape {tuple(slots.shape)}, {message}")
    if slots.device != view.query.device:
        raise fault(part, hook, _elsewhere("slots", slots, view.query))


def _check_shares(
    part: Any, hook: str, found: Choice | RowsChoice, view: ReadView | RowsView
) -> dict[str, Tensor]:
    """Return the weight of the chosen slots and the rest, if given; refuse other shapes."""
    import torch

    batch, heads, group, _ = view.query.shape
    shares = {"weight": (batch, heads, group), "rest": (batch, heads, None)}
    given = {name: each for name in shares if (each := getattr(found, name)) is not None}
    if len(given) == 1:
        raise fault(part, hook, f"has {next(iter(given))} alone, where weight and rest go together")
    for name, each in given.items():
        if not isinstance(each, torch.Tensor) or each.dtype != torch.float32:
            raise fault(part, hook, f"has a {name} that is {kind_of(each)}, not float32 numbers")
        own = shares[name]
        if each.dim() != 3 or any(n not in (None, m) for n, m in zip(own, each.shape, strict=True)):
            raise fault(part, hook, f"has a {name} of shape {tuple(each.shape)}")
    return given


# ---- merging


def _absorb(guard: _Guard, part: Any, hook: str, found: Any, _: Any, eviction: Eviction) -> Any:
    import torch

    evicted = eviction.evicted_positions
    if not isinstance(found, torch.Tensor) or found.dtype != torch.bool:
        raise fault(part, hook, f"returns {kind_of(found)}, not a bool tensor")
    if found.shape != evicted.shape:
        message = f"returns shape {tuple(found.shape)}, not {tuple(evicted.shape)}"
        raise fault(part, hook, f"{message}: batch, KV heads, evicted")
    if found.device != evicted.device:
        raise fault(part, hook, _elsewhere("a tensor", found, evicted))
    if guard.is_first(eviction):
        there = (eviction.kept_positions >= 0)[..., None]
        for name, kept in (("keys", eviction.kept_keys), ("values", eviction.kept_values)):
            _check_finite(part, hook, [(f"kept_{name}", kept.masked_fill(~there, 0))])
    return found


# ---- splits of a budget


def _split(guard: _Guard, part: Any, hook: str, found: Any, problem: AllocationProblem) -> Any:
    if not isinstance(found, Allocation):
        raise fault(part, hook, f"returns {kind_of(found)}, not an Allocation")
    tokens = list(found.tokens)
    if len(tokens) != problem.layers or not all(is_count(each, 0) for each in tokens):
        raise fault(part, hook, f"gives {tokens}, not a count for each of {problem.layers} layers")
    total, least = sum(tokens), sum(problem.min_budgets)
    if total > max(problem.total, least):
        raise fault(part, hook, f"gives {total} tokens in all, more than {problem.total}")
    return found


def _tokens(guard: _Guard, part: Any, hook: str, found: Any, heads: Heads) -> Any:
    import torch

    shape = tuple(heads.importance.shape[:2])
    if not isinstance(found, torch.Tensor) or found.dtype != torch.int64:
        raise fault(part, hook, f"returns {kind_of(found)}, not an int64 tensor")
    if tuple(found.shape) != shape:
        message = f"returns shape {tuple(found.shape)}, not {shape}: batch, KV heads"
        raise fault(part, hook, message)
    if found.device != heads.importance.device:
        raise fault(part, hook, _elsewhere("a tensor", found, heads.importance))
    return found


# ---- codecs


def _sides(guard: _Guard, part: Any, hook: str, found: Any) -> Any:
    pair = isinstance(found, tuple) and len(found) == 2
    if not pair or not all(isinstance(each, Codec) for each in found):
        raise fault(part, hook, f"returns {kind_of(found)}, not the codecs of keys and of values")
    return tuple(guarded_part(each) for each in found)


def _encode(guard: _Guard, part: Any, hook: str, found: Any, numbers: Tensor) -> Any:
    import torch

    if not isinstance(found, tuple) or len(found) != 2:
        raise fault(part, hook, f"returns {kind_of(found)}, not codes and scales")
    dim = numbers.shape[-1]
    asked = {"codes": (1, dim * part.code_bits // 8), "scales": (SCALE_BYTES, part.scales(dim))}
    for (name, (size, last)), each in zip(asked.items(), found, strict=True):
        shape = (*numbers.shape[:-1], last)
        if not isinstance(each, torch.Tensor) or each.element_size() != size:
            raise fault(part, hook, f"has {name} that are {kind_of(each)}, not {size} bytes each")
        if tuple(each.shape) != shape:
            raise fault(part, hook, f"has {name} of shape {tuple(each.shape)}, not {shape}")
        if each.device != numbers.device:
            raise fault(part, hook, _elsewhere(name, each, numbers))
    if numbers.dim() > 1 and numbers.shape[-2] > 1:
        guard.expect()
    return found


def _decode(guard: _Guard, part: Any, hook: str, found: Any, codes: Tensor, _: Tensor) -> Any:
    import torch

    if not isinstance(found, torch.Tensor) or found.dtype != torch.float32:
        raise fault(part, hook, f"returns {kind_of(found)}, not float32 numbers")
    shape = (*codes.shape[:-1], codes.shape[-1] * 8 // part.code_bits)
    if tuple(found.shape) != shape:
        raise fault(part, hook, f"returns shape {tuple(found.shape)}, not {shape}")
    if guard.is_new():
        _check_finite(part, hook, [("what is decoded", found)])
    return found


def _anything(guard: _Guard, part: Any, hook: str, found: Any, *_: Any) -> Any:
    return found


_CHECKS: dict[str, Callable[..., Any]] = {
    "sized": _sized,
    "start": _start,
    "columns": _columns,
    "append": _anything,
    "append_rows": _anything,
    "choose": _choose,
    "choose_rows": _choose_rows,
    "absorb": _absorb,
    "split": _split,
    "tokens": _tokens,
    "sides": _sides,
    "encode": _encode,
    "decode": _decode,
}


def _check_finite(part: Any, hook: str, named: Iterable[tuple[str, Tensor]]) -> None:
    for name, numbers in named:
        wrong = ~numbers.isfinite()
        if bool(wrong.any()):
            raise fault(part, hook, f"leaves {numbers[wrong][0].item()} in {name}")


def _elsewhere(name: str, found: Tensor, expected: Tensor) -> str:
    return f"has {name} on {found.device}, and the slots are on {expected.device}"
