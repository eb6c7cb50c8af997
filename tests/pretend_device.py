"""A second device that any machine has: its tensors are the CPU's, and must not meet the CPU's own.

Tensors on it compute as on a CPU and say that they are elsewhere. As on a GPU, an operation that
meets tensors of both raises, but for copies, for single numbers, and for tensors of the CPU that
choose places of one on the device. The device is called `meta`, which torch asks no machine for.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import kvtool

DEVICE = torch.device("meta")
_KVTOOL, _TRANSFORMERS = (str(Path(each.__file__).parent) for each in (kvtool, transformers))
_ATEN = torch.ops.aten
_COPIES = (_ATEN._to_copy.default, _ATEN.copy_.default)
_PLACES = (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default)
_MAKERS = (torch.tensor, torch.as_tensor)
_ITEMS = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


class OnDevice(torch.Tensor):
    """A tensor of the device; `held` is the CPU's tensor with its numbers."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device=DEVICE, **layout
        )

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:
        return f"OnDevice({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _compute(func, args, kwargs or {})


@contextmanager
def pretended() -> Iterator[None]:
    """Let tensors be made on the device inside."""
    with _Python(), _Operations():
        yield


def put(module: nn.Module) -> nn.Module:
    """Move a module to the device."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                moved = OnDevice(weight.detach())
                part._parameters[name] = nn.Parameter(moved, requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = OnDevice(buffer)
    return module


def _is_device(wanted: object) -> bool:
    return wanted is not None and torch.device(wanted).type == DEVICE.type


def _compute(func, args, kwargs):
    """Compute on the CPU; the result is on the device if that was asked for, or if tensors were."""
    leaves, form = tree_flatten((args, kwargs))
    tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    _check_together(func, args, tensors)
    asked = [each for each in leaves if isinstance(each, torch.device)]
    stays = _is_device(asked[0]) if asked else bool(there)
    if func is _ATEN.copy_.default:
        stays = isinstance(args[0], OnDevice)
    args, kwargs = tree_unflatten([_here(each) for each in leaves], form)
    found = func(*args, **kwargs)
    if not stays:
        return found
    known = {id(tensor.held): tensor for tensor in there}  # what was changed in place

    def show(result):
        if not isinstance(result, torch.Tensor):
            return result
        return known[id(result)] if id(result) in known else OnDevice(result)

    return tree_map(show, found)


def _concerns_device(thing) -> bool:
    return isinstance(thing, OnDevice) or (isinstance(thing, torch.device) and _is_device(thing))


def _here(thing):
    """The copy of an argument on the CPU."""
    if isinstance(thing, torch.device):
        return torch.device("cpu")
    return thing.held if isinstance(thing, OnDevice) else thing


def _check_together(func, args, tensors: list[torch.Tensor]) -> None:
    """Refuse what a GPU would refuse."""
    if func in _COPIES or not any(isinstance(tensor, OnDevice) for tensor in tensors):
        return
    strange = [t for t in tensors if not isinstance(t, OnDevice) and t.dim() > 0]
    if func in _PLACES and isinstance(args[0], OnDevice):
        chosen = [id(place) for place in args[1]]
        strange = [tensor for tensor in strange if id(tensor) not in chosen]
    if strange:
        shapes = [(type(tensor).__name__, *tensor.shape) for tensor in tensors]
        raise RuntimeError(f"{func}: tensors of two devices: {shapes}")


class _Operations(TorchDispatchMode):
    """Make tensors on the device where they are asked for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = tree_flatten((args, kwargs))[0]
        if any(map(_concerns_device, leaves)):
            return _compute(func, args, kwargs)
        return func(*args, **kwargs)


class _Python(TorchFunctionMode):
    """What torch does with lists before it comes to an operation."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _MAKERS and _is_device(kwargs.get("device")):
            return func(*args, **kwargs | {"device": "cpu"}).to(DEVICE)
        if isinstance(args[0] if args else None, OnDevice):
            if func is torch.Tensor.tolist:
                return args[0].cpu().tolist()
            if func in _ITEMS:
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                index = tuple(
                    torch.tensor(each).to(DEVICE) if isinstance(each, list) else each
                    for each in index
                )
                args = args[0], index, *args[2:]
        return func(*args, **kwargs)


class Launches(TorchDispatchMode):
    """Counts what a GPU would be asked to do, by name, and how often the host waits for it.

    Views and bare memory launch nothing.

    Attributes:
        names: all launches.
        own: those of them that kvtool asks for, in place of the model.
        waits: copies between host and device, and numbers that the host reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.own: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def note(self, name: str) -> None:
        """Count a launch."""
        self.names[name] += 1
        self.own[name] += _is_own()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name, returned = operation.name(), [each.alias_info for each in operation._schema.returns]
        views = any(alias and not alias.is_write for alias in returned)
        if not (views or "empty" in name or "_unsafe_view" in name):
            self.note(name)
        found = operation(*args, **(kwargs or {}))
        moved = operation in _COPIES and found.device != args[-1 if "copy_" in name else 0].device
        self.waits[name] += moved or name in ("aten::_local_scalar_dense", "aten::nonzero")
        return found


def _is_own() -> bool:
    """Whether kvtool runs, and not transformers that it has called."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith((_KVTOOL, _TRANSFORMERS)):
            return frame.f_code.co_filename.startswith(_KVTOOL)
        frame = frame.f_back
    return False


def as_kernel(function: Callable, launches: Launches) -> Callable:
    """Let one launch on the device compute what a function does on the CPU."""

    def run(*args, **kwargs):
        args, kwargs = tree_map(_here, (args, kwargs))
        with _disable_current_modes():
            found = function(*args, **kwargs)
        launches.note(function.__name__)
        return tree_map(
            lambda part: OnDevice(part) if isinstance(part, torch.Tensor) else part, found
        )

    return run
