"""Versions for a bug report, as `python -m kvtool --version` prints them, and missing packages."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from kvtool.version import VERSION

_PACKAGES = ("torch", "transformers", "flash-attn", "triton")


def versions() -> str:
    """List kvtool, Python, the packages that decide how fast it runs, and the GPU; a line each."""
    import torch

    gpu = "none"
    if torch.cuda.is_available():
        gpu = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    found = {"kvtool": VERSION, "Python": platform.python_version()}
    found |= {name: _installed(name) for name in _PACKAGES}
    return "".join(f"{name} {each}\n" for name, each in (found | {"GPU": gpu}).items())


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
