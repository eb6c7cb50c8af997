"""The part of a feature for all layers of a cache, and its work in the cache's forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvtool.cache.slots.layer import SlotLayer
from kvtool.policies.policy import Policy

if TYPE_CHECKING:
    from typing_extensions import Self


Budgets = Callable[[list[int]], list[int] | None]


class CachePart:
    """What one feature keeps for all layers; empty until the feature has something to keep.

    Attributes:
        name: by which a cache knows it.
        by_logits: whether it needs the token ids before each forward and all logits after it, and
            lets layers take a forward in one block.
        refusals: what it does not work with, and why; see `kvtool.cache.slots.part.refusal`.
    """

    name: ClassVar[str]
    by_logits: ClassVar[bool] = False
    refusals: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def of(cls, cache: Any) -> Self | None:
        """Return the part of this kind that a cache has, None if it has none."""
        part: object = cache.parts.get(cls.name)
        return part if isinstance(part, cls) else None

    @classmethod
    def serves(cls, policy: Policy) -> bool:
        """Whether a policy has the feature."""
        return False

    @classmethod
    def make(cls, layers: list[SlotLayer], policy: Policy) -> CachePart | None:
        """Make the part of a cache; None where its policy or its layers have no use for it."""
        return None

    # ---- what it keeps

    def clear(self) -> None:
        """Forget the text."""

    def reindex(self, change: Callable[[Tensor], Tensor]) -> None:
        """Let everything follow the batch entries, by what is done to a tensor of theirs."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return 0

    # ---- files

    def tensors(self) -> dict[str, Tensor]:
        """Return what a file holds of it, by its names in the file."""
        return {}

    def check(
        self, file: Any, slots: int | None, logits: tuple[int, int], dtype: torch.dtype
    ) -> None:
        """Refuse what a file holds in place of it.

        Args:
            file: a `kvtool.cache.files.checks.FileTensors`, of which it takes its tensors.
            slots: of the first layer in the file.
            logits: (batch, vocab), the shape of a token's logits.
            dtype: of the model.
        """

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Take back what `tensors` gave, from all tensors of the file."""

    # ---- prompts

    def begin_prompt(self) -> None:
        """Note that a prompt begins."""

    def end_prompt(self) -> None:
        """Note that a prompt has been read, and buffers have the size of the tokens to come."""

    def reads_to(self, lengths: list[int], budgets: Budgets) -> list[int]:
        """Return how far each batch entry is read at least, new tokens left out.

        Args:
            lengths: tokens of each entry at the prompt's end.
            budgets: returns what each of entries so long may keep; None: not known yet.
        """
        return lengths

    # ---- forwards

    def begin_forward(self, tokens: Tensor, valid: Tensor | None, decoding: bool) -> None:
        """Free slots for the tokens of a forward.

        Args:
            tokens: (batch, q_len) int64.
            valid: (batch, q_len) bool, False = padding; None: no padding.
            decoding: whether it is a decoded token, which takes a slot in place.
        """

    def check_tokens(self, decoding: bool) -> None:
        """Refuse the tokens that a layer is about to take in."""

    def begin_block(self, layer: SlotLayer) -> None:
        """Prepare a layer for a block of a prompt that it is about to store."""

    def end_forward(self, logits: Tensor) -> None:
        """Look at the logits, (batch, q_len, vocab), of a forward that has run."""


class CacheParts(dict[str, CachePart]):
    """The parts of a cache by name, and whether one of them scores by logits; found once."""

    def __init__(self, parts: Iterable[CachePart] = ()) -> None:
        super().__init__({part.name: part for part in parts})
        self.by_logits = any(part.by_logits for part in self.values())
