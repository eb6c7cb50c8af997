"""Schedule of the cuts of a layer that is not cut after every token.

It is a part of the layer, and no feature: when a layer is cut decides how many slots it reserves,
which layers are grouped, and whether a token needs its weights. So the steps ask for it by name.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvtool.cache.slots.part import Lanes, LayerSite, Part


class CutSchedule(Part):
    """How many tokens a layer will have seen when it is cut next.

    Nothing is counted while tokens are decoded: the layer counts what it has seen.

    Attributes:
        spare: tokens above the budget at which a batch entry is cut.
        until: tokens, padding included, that the layer will have seen when one of them may be;
            None: not counted since the last prompt.
    """

    name = "cut_schedule"
    joins_decode = False
    joins_padded = False

    def __init__(self, spare: int) -> None:
        self.spare = spare
        self.until: int | None = None

    @classmethod
    def make(cls, site: LayerSite) -> CutSchedule | None:
        return None if site.policy.cuts is None else cls(site.policy.spare)

    def for_heads(self, lanes: Lanes) -> CutSchedule:  # whose cuts come at other times
        return CutSchedule(self.spare)

    def clear(self) -> None:
        self.until = None

    def end_block(self) -> None:
        self.clear()

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        self.until = None

    def left(self, seen: int) -> int:
        """Count the tokens until a cut, for a layer that has seen `seen`; 0 where it is unknown."""
        return 0 if self.until is None else max(0, self.until - seen)

    def count(self, held: int | Tensor, budget: int | Tensor, seen: int) -> None:
        """Count anew; a device sync where entries differ.

        Args:
            held: tokens of each entry or head.
            budget: of each.
            seen: tokens that the layer has seen.
        """
        left = budget + self.spare - held
        self.until = seen + max(0, int(left.min()) if isinstance(left, Tensor) else left)
