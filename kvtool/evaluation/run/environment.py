"""The environment of a run: versions, processor, threads, GPU."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvtool.documents.memory import ModelShape
from kvtool.documents.results import Environment, ModelUsed
from kvtool.lazy_torch import torch
from kvtool.models.load import Loaded

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "numpy",
    "sacrebleu",
    "rouge-score",
    "lm-eval",
    "flash-attn",
)


def environment() -> Environment:
    """Describe this machine and its packages."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return Environment(
        python=platform.python_version(),
        os=platform.platform(),
        cpu=_cpu(),
        threads=torch.get_num_threads(),
        gpu=gpu,
        cuda=torch.version.cuda if gpu else None,
        packages={name: found for name in _PACKAGES if (found := _version(name)) is not None},
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_commit() -> str | None:
    """Return the commit of the checkout that kvtool runs from, None if it is installed."""
    here = Path(__file__).parent
    if not any((folder / ".git").exists() for folder in list(here.parents)[:3]):
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def without_home(text: str) -> str:
    """Return a text in which the user's folder is `~`."""
    home = os.path.expanduser("~")
    return text.replace(home, "~") if len(home) > 1 else text


def model_used(loaded: Loaded) -> ModelUsed:
    """Describe a loaded model."""
    from kvtool.cache.entry.build import kernel_of

    shape = ModelShape.of(loaded.model.config, name=loaded.name)
    return ModelUsed(
        id=without_home(loaded.name),
        revision=loaded.revision,
        config_hash=loaded.config_hash,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        device=loaded.model.device.type,
        attn_implementation=kernel_of(loaded.model),
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        trained_length=shape.trained_length,
    )
