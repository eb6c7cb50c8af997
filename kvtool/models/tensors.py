"""Refuse weights that are not those of their configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.models.folder import UNQUANTISED


def check_tensors(name: str, info: Mapping[str, Any]) -> None:
    """Refuse weights of other shapes, and weights that lack some.

    Args:
        name: of the model.
        info: of the weights, as `from_pretrained` returns it.

    Raises:
        KvtoolError: they do not fit.
    """
    if info["mismatched_keys"]:
        tensor, stored, expected = sorted(info["mismatched_keys"])[0]
        raise KvtoolError(
            f"the weights of `{name}` do not fit its config.json: {tensor} is "
            f"{tuple(stored)}, must be {tuple(expected)}"
        )
    missing = sorted(info["missing_keys"])
    if missing and any(key.endswith(".qweight") for key in info["unexpected_keys"]):
        raise KvtoolError(
            f"the weights of `{name}` are quantised (GPTQ or AWQ), and its config.json has no "
            "quantization_config that says how",
            hint=UNQUANTISED,
        )
    if missing:
        raise KvtoolError(
            f"the weights of `{name}` lack {len(missing)} tensors of its architecture "
            f"(first: {missing[0]})"
        )
