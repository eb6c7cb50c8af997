"""Count the tokens that a layer has seen, on the host, and by batch entry where they differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Unwritten(NamedTuple):
    """A decoded token that the kernel which attends it is to write.

    Attributes:
        key, value: (batch, kv_heads, 1, dim).
        place: (batch or 1,) its position, -1 for padding; None: it is not counted yet.
    """

    key: Tensor
    value: Tensor
    place: Tensor | None = None


class Addresses:
    """Where static steps find the tensors that other steps replace."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def keep(self, name: str, value: Tensor) -> Tensor:
        """Copy a tensor to where the one before was, if there is such a place of its shape."""
        fixed = self._tensors.get(name)
        if value is fixed:
            return value
        with torch.inference_mode(False):
            if fixed is None or fixed.shape != value.shape:
                fixed = self._tensors[name] = torch.empty_like(value)
            return fixed.copy_(value)


class TokenCounts:
    """Tokens that a layer has seen.

    Attributes:
        seen: tokens seen, padding included: what transformers calls the sequence length.
        lengths: (batch,) int64 tokens seen without padding; None where no batch entry is padded
            (then it is `seen`).
        seen_device: (1, 1, 1) int64, `seen` on the device with the running token, during a step
            that may neither read nor change numbers on the host (`kvtool.cache.steps.static`).
    """

    def __init__(self) -> None:
        self.count_from(0, None)

    def count_from(self, seen: int, lengths: Tensor | None) -> None:
        """Say how many tokens have been seen."""
        self.seen, self.lengths = seen, lengths
        self.seen_device: Tensor | None = None

    @property
    def tokens_seen(self) -> int | Tensor:
        """Tokens of each batch entry so far: one number, or int64 (batch or 1, 1, 1)."""
        if self.lengths is not None:
            return self.lengths[:, None, None]
        return self.seen if self.seen_device is None else self.seen_device

    def next_positions(self) -> int | Tensor:
        """Return where the next token of each batch entry will be: one number, or (batch or 1, 1).

        In a static step that is the running token, which the host has counted.
        """
        if self.lengths is not None:
            return self.lengths[:, None]
        return self.seen if self.seen_device is None else self.seen_device[0] - 1

    def count_apart(self, batch: int, device: torch.device) -> None:
        """Count every batch entry by itself from here on."""
        if self.lengths is None:
            self.lengths = torch.full((batch,), self.seen, device=device)

    def count_block(self, tokens: int, valid: Tensor | None = None) -> None:
        """Count a block of `tokens`, padding included, and (batch,) `valid` ones of each entry."""
        self.seen += tokens
        if valid is not None and self.lengths is not None:
            self.lengths = self.lengths + valid

    def count_token(self, positions: Tensor | None) -> int | Tensor:
        """Count a decoded token.

        Args:
            positions: (batch, 1), -1 where a batch entry has padding instead; None: none has.

        Returns:
            Its position: one number, or (batch or 1,) with -1 for padding.
        """
        before = self.seen
        if self.seen_device is None:
            self.seen += 1
        if positions is not None and self.lengths is None:
            self.lengths = torch.full_like(positions[:, 0], before)
        if self.lengths is None:
            return before if self.seen_device is None else self.seen_device.flatten() - 1
        new = self.lengths if positions is None else positions[:, 0].to(self.lengths.device)
        if self.seen_device is None:
            self.lengths = self.lengths + (new >= 0)
            return new
        new = new.clone()
        self.lengths.add_(new >= 0)
        return new

    def reindex_counts(self, change: Callable[[Tensor], Tensor]) -> None:
        """Let counts follow the batch entries."""
        if self.lengths is not None:
            self.lengths = change(self.lengths)

    # ---- static steps

    def fix_counts(self, addresses: Addresses) -> None:
        """Have what a static step changes at an address that stays."""
        if self.lengths is not None:
            self.lengths = addresses.keep("lengths", self.lengths)

    def begin_static(self, seen_device: Tensor) -> None:
        """Count a token on the host, and use the device's count from here on."""
        self.seen += 1
        self.seen_device = seen_device

    def end_static(self, *, ran: bool) -> None:
        """Use the host's count again.

        Args:
            ran: whether the step ran; if not, its token is taken back.
        """
        self.seen_device = None
        self.seen -= not ran
