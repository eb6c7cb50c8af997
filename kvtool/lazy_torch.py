"""torch for modules that commands read before they need it: the first use of it imports it.

`from kvtool.lazy_torch import Tensor, torch` is at the head of a module, in place of an import
in each of its functions. `Tensor` is for annotations alone.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class _Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") and name != "__version__":  # tools ask every module for them
                raise AttributeError(name)
            value = getattr(import_module(self.__name__), name)
            setattr(self, name, value)  # the next use finds it without a call
            return value

    torch = _Lazy("torch")
    Tensor = "torch.Tensor"
