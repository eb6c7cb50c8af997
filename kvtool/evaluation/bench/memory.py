"""How much memory a piece of work needs at its peak, on top of what was there."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def watched_devices(model: PreTrainedModel) -> list[torch.device]:
    """Return the GPUs that hold a part of a model, or the CPU where none does."""
    placed = {weight.device for weight in model.parameters()} | {model.device}
    gpus = [device for device in placed if device.type == "cuda"]
    return sorted(gpus, key=str) or [model.device]


class Peak:
    """The growth of memory since the object was made: of the GPUs, or of the process on a CPU.

    Of several GPUs the peaks add up, though they need not have come at the same moment. On a CPU
    the peak resident size is reset through Linux' /proc; elsewhere nothing is told. It is the
    operating system's view: memory that the allocator reuses does not show.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._gpus = [device for device in devices if device.type == "cuda"]
        self._before: int | None = None
        if self._gpus:
            import torch

            for gpu in self._gpus:
                torch.cuda.reset_peak_memory_stats(gpu)
            self._before = sum(torch.cuda.memory_allocated(gpu) for gpu in self._gpus)
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
        if self._gpus:
            import torch

            return sum(torch.cuda.max_memory_allocated(gpu) for gpu in self._gpus) - self._before
        now = _read("VmHWM:")
        return None if now is None else max(now - self._before, 0)


def _read(name: str) -> int | None:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return None
