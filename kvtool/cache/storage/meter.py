"""Count the bytes of key and value buffers where they grow and shrink."""

from __future__ import annotations


class ByteMeter:
    """The bytes that all layers of a cache hold, and the most that they have held.

    Attributes:
        held: bytes of all key and value buffers now.
        peak: the most that there were while a block of a prompt ran, the block itself included.
    """

    def __init__(self) -> None:
        self.held = self.peak = 0

    def change(self, by: int) -> None:
        """Note that buffers have grown, or shrunk, by so many bytes."""
        self.held += by

    def run(self, block: int) -> None:
        """Note that a block of so many bytes runs beside what is held."""
        self.peak = max(self.peak, self.held + block)

    def forget(self) -> None:
        """Forget the peak."""
        self.peak = 0
