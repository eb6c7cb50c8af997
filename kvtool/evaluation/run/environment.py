"""The environment of a run: versions, processor, threads, GPU."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvtool.documents.memory import ModelShape
from kvtool.documents.results import Environment, ModelUsed
from kvtool.lazy_torch import torch
from kvtool.models.chat import template_of
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


def text_hash(loaded: Loaded) -> str:
    """Hash what, beside the weights, decides on prompts and answers.

    That is the tokenizer with its chat template, and the model's own settings of generation, such
    as the tokens that end a text.
    """
    tokenizer = loaded.tokenizer
    generation = loaded.model.generation_config.to_diff_dict()
    generation = {name: generation[name] for name in generation if name != "transformers_version"}
    template = template_of(tokenizer)
    parts = [_tokenizer_parts(tokenizer), tokenizer.special_tokens_map, template, generation]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _tokenizer_parts(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    parts = json.loads(backend.to_str())
    return {name: parts[name] for name in parts if name not in ("truncation", "padding")}
