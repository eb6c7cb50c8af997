"""Changes that `attach` made in a model, and what has been learned of the model since."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

_NAME = "_kvtool_attachment"

T = TypeVar("T")


class HiddenHooks:
    """Hooks that show hidden states; they go when the last cache that holds them does."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self.remove = weakref.finalize(self, _remove, handles)

    def __deepcopy__(self, memo: dict) -> HiddenHooks:
        return self  # the model's


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _none() -> None:
    return None


class Attachment:
    """What `detach` undoes.

    Attributes:
        implementation: the attention that the model had before.
        eager: whether the model's own eager attention runs, watched by hooks.
        hooks: handles of all hooks.
        hidden: returns the hooks that show hidden states; None where no cache needs them any more.
    """

    hidden: Callable[[], HiddenHooks | None]

    def __init__(
        self, implementation: str, hooks: list[RemovableHandle], *, eager: bool = False
    ) -> None:
        self.implementation, self.hooks, self.eager = implementation, hooks, eager
        self.hidden = _none
        self._known: dict[Hashable, Any] = {}

    def note_hidden(self, hooks: HiddenHooks) -> None:
        """Know of hooks as long as a cache holds them."""
        self.hidden = weakref.ref(hooks)

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
