"""The file of key bases that `kvtool profile --metrics key_basis` writes beside a profile."""

from __future__ import annotations

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvtool.documents.reading import expand
from kvtool.errors import UsageError

NAME = "key_basis"


def read_basis(path: str) -> Tensor:
    """Read the bases of all layers.

    Returns:
        (layers, kv_heads, head_dim, head_dim), a direction a column, NaN for layers without one.

    Raises:
        UsageError: no such file, or none with key bases.
    """
    if not expand(path).is_file():
        raise UsageError(f"loki: no file of key bases at `{path}`")
    try:
        with safe_open(expand(path), framework="pt") as file:
            return file.get_tensor(NAME)
    except (SafetensorError, OSError, ValueError) as error:
        raise UsageError(
            f"`{path}` holds no `{NAME}`",
            hint=f"written by kvtool profile --metrics {NAME} -o profile.yaml, beside it",
        ) from error
