"""How many bytes a model's weights take, before they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvtool.model_shape import stored_dtype
from kvtool.models.failures import in_one_line, library_output_on_stderr


def weight_bytes(
    config: Any, dtype: str, where: Mapping[str, Any] = MappingProxyType({})
) -> int | None:
    """Count the bytes of a model's weights and buffers from its configuration.

    The model is built without memory for its tensors; weights that are tied count once.

    Args:
        config: a transformers configuration.
        dtype: in which it runs, by name; `auto`: the checkpoint's own.
        where: how the checkpoint is asked for, in transformers' words.

    Returns:
        None where the weights are quantised, which the configuration does not count.

    Raises:
        KvtoolError: no model can be built from the configuration.
    """
    if getattr(config, "quantization_config", None) is not None:
        return None
    import torch
    from transformers import AutoModelForCausalLM

    wanted = getattr(torch, stored_dtype(config, dtype))
    with (
        library_output_on_stderr(progress=False),
        in_one_line("configuration", config.name_or_path, where),
        torch.device("meta"),
    ):
        more = {name: value for name, value in where.items() if name != "revision"}
        model = AutoModelForCausalLM.from_config(config, dtype=wanted, **more)
    tensors = {id(each): each for each in [*model.parameters(), *model.buffers()]}
    return sum(each.numel() * each.element_size() for each in tensors.values())
