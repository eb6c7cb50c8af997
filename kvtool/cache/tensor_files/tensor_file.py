"""Safetensors files that appear whole or not at all, written and read without mapping them.

Each tensor is written to the locked temporary of `write_with` by itself, so that no second copy of
all of them is made. Only that lock decides who deletes it. A file is read with plain reads. One
that is rewritten meanwhile gives other bytes, which a checksum finds. A mapping would end the
process or change behind the checksum.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
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


@dataclass(frozen=True)
class _Entry:
    """Where the header says that a tensor is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


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
        header = _read_header(bytes(self._read(length)))
        self.metadata = _read_labels(header.pop(_METADATA, {}))
        self._first = _LENGTH + length
        entries = {name: _read_entry(name, entry) for name, entry in header.items()}
        self._entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
        self.names = list(self._entries)
        end = 0
        for name, entry in self._entries.items():
            if entry.start != end:
                raise DamagedFile(f"`{name}` does not begin where another ends")
            end = entry.end
        if self._first + end != size:
            raise DamagedFile("its tensors do not fill it")

    def read(self, name: str) -> Tensor:
        """Read a tensor into memory of its own.

        Raises:
            KeyError: there is none of this name.
            DamagedFile: the file has become shorter.
        """
        entry = self._entries[name]
        plain = torch.empty(entry.size, dtype=torch.uint8)
        self._file.seek(self._first + entry.start)
        self._fill(plain.numpy().data)
        try:
            return plain.view(entry.dtype).view(entry.shape)
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


def _read_header(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise DamagedFile("its header holds a name twice")
        return found

    try:
        header = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DamagedFile("its header is no JSON") from error
    if not isinstance(header, dict):
        raise DamagedFile("its header is no mapping")
    return header


def _read_labels(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        raise DamagedFile("its metadata are no texts")
    return metadata


def _read_entry(name: str, entry: Any) -> _Entry:
    fields = {"dtype", "shape", "data_offsets"}
    if not isinstance(entry, dict) or entry.keys() != fields:
        raise DamagedFile(f"`{name}` is described by other fields than {sorted(fields)}")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    shape, offsets = entry["shape"], entry["data_offsets"]
    if dtype is None or not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise DamagedFile(f"`{name}` has a dtype, shape or place that cannot be")
    numbers = 1
    for size in shape:
        numbers *= size
    start, end = offsets
    if end - start != numbers * dtype.itemsize:
        raise DamagedFile(f"`{name}` has another size than its shape")
    return _Entry(dtype, tuple(shape), start, end)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 63 for value in values
    )
