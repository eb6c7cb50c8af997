"""Record a step on a CPU as a CUDA graph would be, and replay it: the same operations, in place.

What runs while it is recorded does not count: what it has changed is put back. A replay runs no
line of Python of the step again. It runs the operations that were recorded, on the tensors that
they had, wherever these were by then. So a step that depends on a number of the host, or puts a
tensor in another's place, gives other results than an eager one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ATEN = torch.ops.aten
ASKS_THE_HOST = (
    *(_ATEN._local_scalar_dense.default, _ATEN.nonzero.default, _ATEN.masked_select.default),
    *(_ATEN._unique2.default, _ATEN.unique_consecutive.default),
)
FROM_THE_HOST = _ATEN.lift_fresh.default  # of torch.tensor([..])


class Waits(RuntimeError):
    """The host would wait for the device, which no CUDA graph can record."""


class _Taping(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []
        self.own: set[int] = set()  # storages that the step makes
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in ASKS_THE_HOST:
            raise Waits(f"operation not permitted when stream is capturing: {func}")
        for tensor in _written(func, args, kwargs):
            self._keep(tensor)
        found = func(*args, **kwargs)
        if func is FROM_THE_HOST and found.numel() > 1:
            raise Waits(f"numbers of the host in a recorded step: {found}")
        if not func.is_view:
            self.calls.append((func, args, kwargs, found))
        given = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
        for tensor in _tensors(found):
            place = tensor.untyped_storage().data_ptr()
            if place not in given and place not in self.before:
                self.own.add(place)
        return found

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place in self.own or place in self.before:
            return
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        self.before[place] = whole, whole.clone()


class TapeRecording:
    """In place of `kvtool.generation.graphs.CudaRecording`, of any device's operations."""

    def __init__(self) -> None:
        self._taping = _Taping()
        self.replays = 0

    @property
    def operations(self) -> list[str]:
        """What a replay launches."""
        return [str(func) for func, *_ in self._taping.calls]

    def record(self, run: Callable[[], Tensor], generators: Iterable[torch.Generator]) -> Tensor:
        states = [(each, each.get_state()) for each in generators]
        try:
            with self._taping:
                return run()
        finally:
            for whole, before in self._taping.before.values():
                whole.copy_(before)
            for generator, state in states:
                generator.set_state(state)

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, before in self._taping.calls:
            given = [id(each) for each in _written(func, args, kwargs)]
            found = func(*args, **kwargs)
            for new, old in zip(_tensors(found), _tensors(before), strict=True):
                if id(old) not in given and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


def recorder(made: list[TapeRecording] | None = None):
    """What stands in for `kvtool.generation.graphs.recorder`; it notes what it has made."""

    def of_model(model):
        def make() -> TapeRecording:
            recording = TapeRecording()
            if made is not None:
                made.append(recording)
            return recording

        return make

    return of_model


def _tensors(values: object) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _written(func, args: tuple, kwargs: dict) -> list[Tensor]:
    """The arguments that an operation writes to."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name, args[place] if place < len(args) else None)
        found += _tensors(value)
    return found
