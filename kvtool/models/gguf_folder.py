"""Write what a GGUF file holds as a plain folder, which loads in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtool.models.gguf import GgufFile
from kvtool.models.gguf_load import load_gguf_config, load_gguf_tokenizer, load_gguf_weights
from kvtool.models.tensors import check_tensors


def fill_folder(name: str, gguf: GgufFile, folder: Path, dtype: str, progress: bool) -> None:
    """Write config.json, weights as safetensors and a tokenizer into a folder that is there.

    Args:
        name: of the model.
        dtype: of the weights, by name; `auto`: the file's own, `bfloat16` where it is packed.
        progress: show a bar on stderr.

    Raises:
        KvtoolError: the file cannot be read as it should.
    """
    import torch

    config = load_gguf_config(name, gguf)
    tokenizer = load_gguf_tokenizer(name, gguf)
    wanted: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    model, info = load_gguf_weights(gguf, progress, config=config, dtype=wanted)
    check_tensors(name, info)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
