"""What a run measures on, and how large."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

FIRST = ("pays", "speed", "prompts", "compiled")  # of a device that is lent for minutes
PARTS = (*FIRST, "kernels", "right", "memory", "waits", "model")


@dataclass(frozen=True)
class Settings:
    """Where a run measures and how much.

    Attributes:
        device: a torch device by name.
        tiny: everything in small, to see that it runs.
        deadline: seconds since the epoch after which no case begins.
        work: folder of what outlives a command: the training state.
    """

    device: str
    tiny: bool
    deadline: float
    work: Path

    @property
    def cuda(self) -> bool:
        """Whether it is a GPU of NVIDIA's."""
        return torch.device(self.device).type == "cuda"

    @property
    def backend(self) -> str:
        """Of torch.compile."""
        return "eager" if self.tiny else "inductor"

    def wait(self) -> None:
        """Wait for what runs on the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
