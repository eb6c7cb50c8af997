"""When a layer that is not cut after every token is cut next."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvtool.cache.storage.part import Part


class Due(Part):
    """How many decoded tokens there are to the next cut.

    Attributes:
        spare: tokens above the budget at which a batch entry is cut.
        left: tokens until one of them may be; None: nobody has counted since the last prompt.
    """

    name = "due"

    def __init__(self, spare: int) -> None:
        self.spare = spare
        self.left: int | None = None

    def copy(self) -> Due:
        """The same for a part of the layer's heads, whose cuts come at other times."""
        return Due(self.spare)

    def clear(self) -> None:
        self.left = None

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        self.left = None

    @property
    def soon(self) -> bool:
        """Whether the running token may be the last before a cut."""
        return self.left is None or self.left <= 1

    def pass_token(self) -> None:
        """Count a decoded token, where somebody has counted before."""
        if self.left:
            self.left -= 1

    def count(self, held: int | Tensor, budget: int | Tensor) -> None:
        """Count anew; a device sync where entries differ.

        Args:
            held: tokens of each entry or head.
            budget: of each.
        """
        left = budget + self.spare - held
        self.left = max(0, int(left.min()) if isinstance(left, Tensor) else left)
