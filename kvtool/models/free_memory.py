"""How much memory is free where a model would run."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")  # limits of a container
_GROUP_OLD = Path("/sys/fs/cgroup/memory")


def free_memory(device: str, *, spread: bool = False) -> tuple[str, int | None]:
    """Name a device and count its free bytes.

    Args:
        device: `cpu`, `cuda` or `cuda:1`.
        spread: whether a model is spread over all GPUs, if there are any.

    Returns:
        The device or devices, and None where the system does not tell.
    """
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return "cpu", _free_ram()
    places = [torch.device(device)]
    if spread:
        places = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    free = sum(torch.cuda.mem_get_info(place)[0] for place in places)
    return " + ".join(map(str, places)), free


def _free_ram() -> int | None:
    """Return the memory that a process may still take: the machine's, or its container's if less.

    What only caches files counts as free.
    """
    found = [_of_machine(), _of_group(_GROUP, "memory.max", "memory.current", "inactive_file")]
    names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    found.append(_of_group(_GROUP_OLD, *names))
    return min((each for each in found if each is not None), default=None)


def _of_machine() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in _MEMORY.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _of_group(folder: Path, limit: str, used: str, cached: str) -> int | None:
    """Return what the limit of a control group leaves; None: no such group, or no limit."""
    try:
        most, now = (int((folder / name).read_text()) for name in (limit, used))
        lines = (folder / "memory.stat").read_text().splitlines()
        files = next((int(line.split()[1]) for line in lines if line.startswith(f"{cached} ")), 0)
    except (OSError, ValueError):  # `max` where there is no limit
        return None
    return max(0, most - now + files)
