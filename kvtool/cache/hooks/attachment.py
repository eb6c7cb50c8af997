"""What `attach` changed in a model, and what has been learned of the model since."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

_NAME = "_kvtool_attachment"

T = TypeVar("T")


class Attachment:
    """What `detach` undoes.

    Attributes:
        implementation: the attention that the model had before.
        eager: whether the model's own eager attention runs, watched by hooks.
        hooks: handles of all hooks.
    """

    def __init__(
        self, implementation: str, hooks: list[RemovableHandle], *, eager: bool = False
    ) -> None:
        self.implementation, self.hooks, self.eager = implementation, hooks, eager
        self._known: dict[Hashable, Any] = {}

    def once(self, what: Hashable, ask: Callable[[], T]) -> T:
        """Return what has been found out of the model, asking it the first time."""
        if what not in self._known:
            self._known[what] = ask()
        return self._known[what]


def uncompiled(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model inside what `torch.compile` returns, whose `generate` is the model's."""
    return getattr(model, "_orig_mod", model)


def attachment(model: PreTrainedModel) -> Attachment | None:
    """Return what `attach` noted on this model, None if it is not attached."""
    return getattr(model, _NAME, None)


def note_attachment(model: PreTrainedModel, noted: Attachment | None) -> None:
    """Note on a model what `attach` did; None: nothing any more."""
    if noted is None:
        delattr(model, _NAME)
    else:
        setattr(model, _NAME, noted)


def ask_once(model: PreTrainedModel, what: str, ask: Callable[[], T]) -> T:
    """Return what is to be found out of a model, once for its device and dtype while attached."""
    noted = attachment(model)
    return ask() if noted is None else noted.once((what, model.device, model.dtype), ask)
