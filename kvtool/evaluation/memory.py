"""How much memory a piece of work needs at its peak, on top of what was there."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """The growth of memory since the object was made: of the GPU, or of the process on a CPU.

    On a CPU the peak resident size is reset through Linux' /proc; elsewhere nothing is told. It is
    the operating system's view: memory that the allocator reuses does not show.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None
        if device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
            return
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        with contextlib.suppress(OSError):
            _RESET.write_text("5")
            self._before = _read("VmRSS:")

    def growth(self) -> int | None:
        """Return the peak since the start in bytes above the start, None if it cannot be told."""
        if self._before is None:
            return None
        if self._device.type == "cuda":
            import torch

            return torch.cuda.max_memory_allocated(self._device) - self._before
        now = _read("VmHWM:")
        return None if now is None else max(now - self._before, 0)


def _read(name: str) -> int | None:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return None
