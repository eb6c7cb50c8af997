"""A padded batch as readers see it: all sequences at once, each with its own count and sizes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvtool.lazy_torch import Tensor, torch
from kvtool.maths.selection import top_slots
from kvtool.policies.parts import HeadSizes, Read, State
from kvtool.policies.read.view import ReadView

Made = TypeVar("Made")


@dataclass(frozen=True)
class PerRow:
    """A number for each batch entry, known on CPU and device, so that neither waits.

    Attributes:
        known: one a sequence; where `floor` is given, the most that it may be.
        tensor: (batch, 1, 1) int64, the same on the device; where it is one number for all that
            nothing on the device needs, the number.
        floor: in a static step, what no number is below; None: `known` is exact.
        made: what `once` has made; None: these are the numbers of one layer.
    """

    known: Sequence[int]
    tensor: Any
    floor: int | None = None
    made: dict[Hashable, Any] | None = None

    @classmethod
    def of(cls, known: Sequence[int], device: torch.device) -> PerRow:
        """Put numbers on the device."""
        with torch.inference_mode(False):
            return cls(known, torch.tensor(known, device=device)[:, None, None])

    @classmethod
    def one(cls, number: int) -> PerRow:
        """Take one number for all, which costs nothing on the device."""
        return cls([number], number)

    @property
    def alike(self) -> bool:
        """Whether it is one number for all, and not on the device."""
        return isinstance(self.tensor, int)

    @property
    def most(self) -> int:
        """Return the largest."""
        return max(self.known)

    @property
    def lowest(self) -> int:
        """Return the smallest, or what no number is below."""
        return min(self.known) if self.floor is None else self.floor

    def once(self, name: Hashable, make: Callable[[], Made]) -> Made:
        """Make what follows from the numbers for the first layer of a step, and the others use it.

        A compiler sees by itself that layers compute the same.
        """
        if self.made is None or torch.compiler.is_compiling():
            return make()
        if name not in self.made:
            self.made[name] = make()
        found: Made = self.made[name]
        return found

    def map(
        self, change: Callable[..., int], on_device: Callable[..., Tensor], *others: PerRow
    ) -> PerRow:
        """Compute a number per sequence, on both sides."""
        numbers = [self, *others]
        known = [*map(change, *[each.known for each in numbers])]
        floor = None if {each.floor for each in numbers} == {None} else 0
        tensor = on_device(*[each.tensor for each in numbers])
        return PerRow(known, tensor, floor, None if self.made is None else {})

    def plus(self, more: int) -> PerRow:
        """Add the same number for every sequence."""
        if isinstance(self.tensor, int):
            return PerRow([self.tensor + more], self.tensor + more)
        floor = None if self.floor is None else max(0, self.floor + more)
        made: dict[Hashable, Any] | None = None if self.made is None else {}
        return PerRow([number + more for number in self.known], self.tensor + more, floor, made)

    def least(self, other: PerRow) -> PerRow:
        """Take the smaller of two numbers of each sequence."""
        if self.lowest >= other.most:
            return other
        floor = min(self.lowest, other.lowest)
        found = self.map(min, torch.minimum, other)
        return found if found.floor is None else replace(found, floor=floor)

    def beyond(self, width: int) -> Tensor:
        """Mark the places from a sequence's own number on: bool (batch, 1, width)."""
        return self.once(
            ("beyond", width),
            lambda: torch.arange(width, device=self.tensor.device) >= self.tensor,
        )


@dataclass(frozen=True, kw_only=True)
class RowsView(ReadView):
    """Sequences of different lengths in a layer as a reader sees them decoding. Read only.

    Keys, tables and `tokens` are as long as the longest sequence needs. What is beyond a sequence's
    own tokens means nothing: in keys it is finite, in tables 0.

    Attributes:
        counts: how many tokens each sequence has to choose from.
        sizes: of each sequence's reader, by the names of its fields.
    """

    counts: PerRow
    sizes: Mapping[str, PerRow]


@dataclass(frozen=True)
class RowsChoice:
    """What a decode step attends to in sequences of different lengths.

    Attributes:
        slots: as of `Choice`, -1 where a sequence reads fewer than another.
        pairs: how many of them each sequence reads, in each list of slots.
        estimate, weight, rest: as of `Choice`, the estimate of each sequence.
    """

    slots: Tensor
    pairs: PerRow
    estimate: Sequence[int]
    weight: Tensor | None = None
    rest: Tensor | None = None


class RowsRead(Read):
    """A reader that reads sequences of different lengths at once, as it reads each alone."""

    def append_rows(
        self, tables: State, key: Tensor, value: Tensor, tokens: PerRow, sizes: Mapping[str, PerRow]
    ) -> None:
        """Add a token to each sequence of a padded batch, in place, as `append` does.

        It is the last of `tokens`, and each sequence has its own sizes.
        """

    def choose_rows(self, view: RowsView) -> RowsChoice:
        """Choose for all sequences of a padded batch; any choice will do for one read in full."""
        raise NotImplementedError

    def counted_step(self, layer: HeadSizes, tokens: int) -> int | None:
        """Count what a step reads of one row in bytes without running it; None: it has to run."""
        return None


def reads_together(reader: Read) -> bool:
    """Return whether sequences of different lengths are read at once: no subclass reads one by one.

    A class that has its own `choose` or `append`, but takes over another's for sequences, would be
    read as that other one.
    """
    kinds = type(reader).__mro__

    def depth(name: str) -> int:
        return next(place for place, kind in enumerate(kinds) if name in vars(kind))

    return isinstance(reader, RowsRead) and all(
        depth(f"{name}_rows") <= depth(name) for name in ("append", "choose")
    )


def fill_beyond(numbers: Tensor, count: PerRow, filler: float = -1) -> Tensor:
    """Fill what is beyond a sequence's own count of scores, channels or slots, where -1 is none.

    Args:
        numbers: (batch, kv_heads, width), or (batch, kv_heads, group, width).
    """
    width = numbers.shape[-1]
    if count.lowest >= width:
        return numbers
    beyond = count.beyond(width)
    return numbers.masked_fill(beyond if numbers.dim() == 3 else beyond[:, :, None], filler)


def best_slots(scores: Tensor, count: PerRow) -> Tensor:
    """Find each sequence's own count of slots of highest score, the best first, then -1."""
    return fill_beyond(top_slots(scores, count.most), count)


def last_of(tokens: PerRow) -> Tensor:
    """Return the number of each sequence's newest token, (batch, 1, 1) int64."""
    return tokens.once("last", lambda: tokens.tensor - 1)
