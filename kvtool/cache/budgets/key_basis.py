"""The file of key bases that `kvtool profile --metrics key_basis` writes beside a profile."""

from __future__ import annotations

from torch import Tensor

from kvtool.cache.files.tensor_file import DamagedFile, TensorFile
from kvtool.documents.files import expand
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
        with expand(path).open("rb", buffering=0) as raw:
            return TensorFile(raw).read(NAME)
    except (DamagedFile, OSError, KeyError) as error:
        raise UsageError(
            f"`{path}` holds no `{NAME}`",
            hint=f"written by kvtool profile --metrics {NAME} -o profile.yaml, beside it",
        ) from error
