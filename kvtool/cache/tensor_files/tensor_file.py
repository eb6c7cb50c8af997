"""Safetensors files that appear whole or not at all, written and read without mapping them.

No second copy of all tensors is made. A file that is rewritten while it is read gives other bytes,
which a checksum finds; a mapping would end the process or change behind the checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from kvtool.documents.files import write_with
from kvtool.weights_hash import as_bytes

_DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
_Size = Annotated[int, Field(ge=0, lt=1 << 63)]
_LENGTH = 8  # bytes that hold the header's length, to which tensors are aligned as well
_LONGEST_HEADER = 100_000_000  # as in the format's own library


class DamagedFile(ValueError):
    """A file that is not a whole safetensors file."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, atomically.

    Raises:
        KvtoolError: the system refused, in one line.
    """

    def write(temporary: Path) -> None:
        with temporary.open("wb", buffering=0) as file:
            for part in file_parts(tensors, metadata):
                _write_all(file, part)

    write_with(path, write)


def digest_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the checksum of all that a file holds, which seals it."""
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def digest_of_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the sha256 of the file that `write_tensors` makes, whoever writes to its path next."""
    digest = hashlib.sha256()
    for part in file_parts(tensors, metadata):
        digest.update(part)
    return digest.hexdigest()


def file_parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """The bytes of a safetensors file: length and header, then one tensor after the other."""
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.itemsize
        shape, dtype = list(tensor.shape), _NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)
    yield memoryview(len(text).to_bytes(_LENGTH, "little") + text)
    for name in names:
        yield bytes_of(tensors[name])


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes in order, without a copy where it is on the CPU and in one piece."""
    return as_bytes(tensor.cpu()).numpy().data


def _write_all(file: Any, part: memoryview) -> None:
    while len(part):
        part = part[file.write(part) :]


class _Entry(BaseModel):
    """Where the header says that a tensor is."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    dtype: Literal[tuple(_DTYPES)]  # type: ignore[valid-type]
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]

    def fits(self) -> bool:
        """Whether the place is as large as the shape."""
        start, end = self.data_offsets
        return end - start == math.prod(self.shape) * _DTYPES[self.dtype].itemsize


class _Header(BaseModel):
    """The names of a file's tensors, and what it says of itself."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, _Entry]

    labels: dict[str, str] = Field(default={}, alias="__metadata__")


class TensorFile:
    """A safetensors file that is open for reading.

    Attributes:
        metadata: that the file holds.
        names: of its tensors, in the order of the file.

    Raises:
        DamagedFile: it is not a whole safetensors file.
        OSError: it cannot be read.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(self._read(_LENGTH), "little")
        if length > min(_LONGEST_HEADER, size - _LENGTH):
            raise DamagedFile("its header is longer than the file")
        try:
            header = _Header.model_validate_json(bytes(self._read(length)))
        except ValidationError as error:
            raise DamagedFile("its header does not describe tensors") from error
        self.metadata = header.labels
        self._first = _LENGTH + length
        entries = sorted(header.__pydantic_extra__.items(), key=lambda item: item[1].data_offsets)
        self._entries = dict(entries)
        self.names = list(self._entries)
        end = 0
        for name, entry in entries:
            if entry.data_offsets[0] != end or not entry.fits():
                raise DamagedFile(f"`{name}` is not where another ends, or as large as it says")
            end = entry.data_offsets[1]
        if self._first + end != size:
            raise DamagedFile("its tensors do not fill it")

    def read(self, name: str) -> Tensor:
        """Read a tensor into memory of its own.

        Raises:
            KeyError: there is none of this name.
            DamagedFile: the file has become shorter.
        """
        entry = self._entries[name]
        start, end = entry.data_offsets
        plain = torch.empty(end - start, dtype=torch.uint8)
        self._file.seek(self._first + start)
        self._fill(plain.numpy().data)
        try:
            return plain.view(_DTYPES[entry.dtype]).view(entry.shape)
        except RuntimeError as error:  # sizes beside a zero that overflow
            raise DamagedFile(f"`{name}` has a shape that cannot be") from error

    def _read(self, size: int) -> bytearray:
        content = bytearray(size)
        self._fill(memoryview(content))
        return content

    def _fill(self, buffer: memoryview) -> None:
        while len(buffer):
            count = self._file.readinto(buffer)  # type: ignore[attr-defined]
            if not count:
                raise DamagedFile("it ends too early")
            buffer = buffer[count:]
