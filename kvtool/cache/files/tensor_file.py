"""Safetensors files that appear whole or not at all."""

from __future__ import annotations

import os
import re
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from kvtool.documents.files import write_with


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file, atomically.

    Raises:
        KvtoolError: the system refused, in one line.
    """

    def write(temporary: Path) -> None:
        try:
            save_file(tensors, temporary, metadata=metadata)
        except SafetensorError as error:  # what the system said stands in its text alone
            code = re.search(r"os error (\d+)", str(error))
            if code is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error

    write_with(path, write)
