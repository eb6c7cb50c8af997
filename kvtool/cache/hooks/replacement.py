"""Replace a method on one model by an object that calls it, which follows copies of the model."""

from __future__ import annotations

import inspect
import types
import weakref
from typing import Any, ClassVar, TypeVar

from transformers import PreTrainedModel

from kvtool.errors import KvtoolError

Kind = TypeVar("Kind", bound="Replacement")


class Replacement:
    """Replaces a method on a model; subclasses say which, and what a call of it does.

    Attributes:
        method: the name of the method.
        replaced: what other code had put in its place on this model, None for nothing.
    """

    method: ClassVar[str]

    def __init__(self, model: PreTrainedModel) -> None:
        self.__name__, self.__doc__ = self.method, getattr(type(model), self.method).__doc__
        self.replaced = vars(model).get(self.method)
        self._model = weakref.ref(model)  # a model that is deleted is to be gone at once

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_model": self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _model=weakref.ref(state["_model"]))

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.own)

    @property
    def model(self) -> PreTrainedModel:
        """The model that is called."""
        model = self._model()
        if model is None:
            raise KvtoolError(f"the model is gone, and only its `{self.method}` was kept")
        return model

    @property
    def own(self) -> Any:
        """What this replaces."""
        return self.replaced or types.MethodType(getattr(type(self.model), self.method), self.model)

    @classmethod
    def of(cls: type[Kind], model: PreTrainedModel) -> Kind | None:
        """Return the replacement on a model, None if there is none."""
        found = vars(model).get(cls.method)
        return found if isinstance(found, cls) else None

    @classmethod
    def put_on(cls, model: PreTrainedModel) -> None:
        """Replace a model's method, if it has one."""
        if hasattr(model, cls.method):
            setattr(model, cls.method, cls(model))

    @classmethod
    def take_off(cls, model: PreTrainedModel) -> None:
        """Give a model its own method back."""
        found = cls.of(model)
        if found is not None:
            delattr(model, cls.method)
            if found.replaced is not None:
                setattr(model, cls.method, found.replaced)
