"""Write an exported cache as a prompt cache of mlx-lm, which `mlx_lm.generate` loads."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from kvtool.cache.tensor_files.tensor_file import write_tensors
from kvtool.engines.virtual_prompt import VirtualPrompt
from kvtool.errors import UsageError

_OFFSETS_SINCE = (0, 32)
_KIND = "KVCache"


def read_release(text: str | None) -> tuple[int, ...]:
    """Return a release of mlx-lm as numbers; None: the first with the newest form.

    >>> read_release("0.31.3")
    (0, 31, 3)

    Raises:
        UsageError: it is none.
    """
    if text is None:
        return _OFFSETS_SINCE
    if re.fullmatch(r"\d+(\.\d+)+", text) is None:
        raise UsageError(f"`{text}` is no release of mlx-lm", hint="--engine-version 0.32.2")
    return tuple(map(int, text.split(".")))


def save_prompt_cache(prompt: VirtualPrompt, path: Path, release: tuple[int, ...]) -> None:
    """Write a prompt cache, whole or not at all; since 0.32 it holds each layer's length.

    Raises:
        KvtoolError: the system refused.
    """
    tensors: dict[str, Tensor] = {}
    newest = release >= _OFFSETS_SINCE
    about, kinds = ("0", "1") if newest else ("1", "2")
    metadata = {f"{about}.model": prompt.metadata["model"], f"{about}.tokenizer_config": "{}"}
    metadata |= {"2.0": ""} if newest else {}
    for i, (keys, values) in enumerate(prompt.layers()):
        tensors |= {f"{i}.0": keys[None], f"{i}.1": values[None]}
        metadata[f"{kinds}.{i}"] = _KIND
        if newest:
            tensors[f"{i}.2"] = torch.tensor(keys.shape[1], dtype=torch.int32)
            metadata |= {f"2.{i + 1}.0": f"{i}.2", f"2.{i + 1}.1": "scalar"}
        else:
            metadata[f"0.{i}"] = ""
    write_tensors(path, tensors, metadata)
