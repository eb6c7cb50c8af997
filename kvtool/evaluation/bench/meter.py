"""Measure what a sample costs while it runs: tokens, seconds, bytes, and memory at its peak.

The peak is counted on top of the memory that was in use before.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.evaluation.samples.sample import Json
from kvtool.lazy_torch import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvtool.cache.whole.cache import KVCache


_REPORTED = (
    *("kv_bytes", "allocated_bytes", "state_bytes", "full_bytes", "host_bytes"),
    *("traffic_pairs", "traffic_bytes", "evicted"),
)
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def watched_devices(model: PreTrainedModel) -> list[torch.device]:
    """Return the GPUs that hold a part of a model, or the CPU where none does."""
    placed = {weight.device for weight in model.parameters()} | {model.device}
    gpus = [device for device in placed if device.type == "cuda"]
    return sorted(gpus, key=str) or [model.device]


class Peak:
    """The growth of memory since the object was made: of the GPUs, or of the process on a CPU.

    Of several GPUs the peaks add up, though they need not have come at the same moment. On a CPU
    the peak resident size is reset through Linux' /proc; elsewhere nothing is measured. It is the
    operating system's view: memory that the allocator reuses does not show.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._gpus = [device for device in devices if device.type == "cuda"]
        self._before: int | None = None
        if self._gpus:
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
        """Return the peak since the start in bytes above the start, None if it is not measured."""
        if self._before is None:
            return None
        if self._gpus:
            return sum(torch.cuda.max_memory_allocated(gpu) for gpu in self._gpus) - self._before
        now = _read("VmHWM:")
        return None if now is None else max(now - self._before, 0)


def _read(name: str) -> int | None:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return None


@dataclass
class Meter:
    """What one sample cost: seconds and tokens add up, bytes are those of its largest cache.

    Attributes:
        peak: the growth of memory since the sample began.
        kept_per_layer: the most tokens that each layer held after a prompt or a turn.
        shared: whether a prompt was read for others, too: its seconds are those of all together,
            and its memory cannot be measured alone.
        rows: answers that were decoded in one batch: its seconds are its share of each step's, and
            its memory cannot be measured alone either.
    """

    peak: Peak
    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decoded: int = 0
    bytes: dict[str, float] = field(default_factory=dict)
    kept_per_layer: list[int] = field(default_factory=list)
    shared: bool = False
    rows: int = 1

    def count_prefill(
        self, cache: KVCache, *, tokens: int, seconds: float, shared: bool = False
    ) -> None:
        """Count a text that was fed as a prompt."""
        self.shared |= shared
        self.prefill_s += seconds
        self.prompt_tokens += tokens
        self.read(cache)

    def count_decoding(
        self, cache: KVCache, *, steps: int, seconds: float, tokens: int | None = None
    ) -> None:
        """Count forwards of single tokens.

        Args:
            tokens: how many are new, by default as many as there were steps.
        """
        self.decode_s += seconds
        self.new_tokens += steps if tokens is None else tokens
        self.decoded += steps
        self.read(cache)

    def count_step(self, seconds: float, rows: int) -> None:
        """Count the share of a step in which some rows were decoded."""
        self.decode_s += seconds
        self.rows = max(self.rows, rows)

    def count_answer(self, cache: KVCache, tokens: int, seconds: float, *, grown: bool) -> None:
        """Count an answer that was scored, whose seconds are not those of decoding.

        Args:
            grown: whether the cache holds the whole answer on top, as it never does in decoding; a
                decoded token would read the tokens kept before.
        """
        self.decode_s += seconds
        self.new_tokens += tokens
        if grown:
            now = self.bytes
            self.bytes = now | {
                "traffic_pairs": now["kept_tokens"],
                "traffic_bytes": now["kv_bytes"],
            }
        else:
            self.read(cache)

    def read(self, cache: KVCache) -> None:
        """Take the bytes of a cache as it is now, from its tensors."""
        report = cache.report(of_all_processes=True)
        attended = [kept for kept in report.kept_per_layer if kept] or [0]
        now = {
            "kept_tokens": sum(attended) / len(attended),
            "peak_kv_bytes": report.peak_bytes,
            **{name: getattr(report, name) for name in _REPORTED},
        }
        self.bytes = {name: max(value, self.bytes.get(name, 0)) for name, value in now.items()}
        before = self.kept_per_layer or [0] * len(report.kept_per_layer)
        self.kept_per_layer = [max(two) for two in zip(before, report.kept_per_layer, strict=True)]

    def record(self) -> Json:
        """Return everything as JSON values."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "decoded_tokens": self.decoded,
            "prefill_s": round(self.prefill_s, 6),
            "decode_s": round(self.decode_s, 6),
            **self.bytes,
            **({"kept_per_layer": self.kept_per_layer} if self.kept_per_layer else {}),
            "peak_memory_bytes": None if self.shared or self.rows > 1 else self.peak.growth(),
            **({"batch": self.rows} if self.rows > 1 else {}),
        }
