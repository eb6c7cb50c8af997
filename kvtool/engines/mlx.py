"""Write an exported cache as a prompt cache of mlx-lm, which `mlx_lm.generate` loads."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from kvtool.engines.virtual_prompt import VirtualPrompt
from kvtool.errors import UsageError


def has_offsets(release: str | None) -> bool:
    """Return whether a release of mlx-lm stores each layer's length; None: the newest does."""
    found = re.match(r"(\d+)\.(\d+)(\.\d+)*$", release or "0.32")
    if found is None:
        raise UsageError(f"`{release}` is no release of mlx-lm", hint="--engine-version 0.32.2")
    return (int(found[1]), int(found[2])) >= (0, 32)


def prompt_cache(
    prompt: VirtualPrompt, release: str | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a prompt cache."""
    newest, tensors = has_offsets(release), dict[str, Tensor]()
    about, kinds = ("0", "1") if newest else ("1", "2")
    metadata = {f"{about}.model": prompt.metadata["model"], f"{about}.tokenizer_config": "{}"}
    metadata |= {"2.0": ""} if newest else {}
    for i, (keys, values) in enumerate(prompt.layers()):
        tensors |= {f"{i}.0": keys[None], f"{i}.1": values[None]}
        metadata[f"{kinds}.{i}"] = "KVCache"
        if newest:
            tensors[f"{i}.2"] = torch.tensor(keys.shape[1], dtype=torch.int32)
            metadata |= {f"2.{i + 1}.0": f"{i}.2", f"2.{i + 1}.1": "scalar"}
        else:
            metadata[f"0.{i}"] = ""
    return tensors, metadata
