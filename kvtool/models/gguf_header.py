"""Read the head of a GGUF file: its settings and the names of its tensors, without a library."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.errors import UsageError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_TEXT, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_NUMBERS |= {12: "d"}
_FLOATS = {0: "float32", 1: "float16", 30: "bfloat16"}


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of itself.

    Attributes:
        settings: by name; of an array, how many entries it has.
        tensors: the type of each tensor by name, as a number of ggml.
    """

    settings: Mapping[str, Any]
    tensors: Mapping[str, int]

    def text(self, name: str) -> str | None:
        """Return a setting that is a text, None where there is none."""
        value = self.settings.get(name)
        return value if isinstance(value, str) else None

    @property
    def dtype(self) -> str:
        """The dtype to unpack the weights into: their own, or `bfloat16` where they are packed."""
        kinds = set(self.tensors.values())
        if not kinds <= set(_FLOATS):
            return "bfloat16"
        halves = kinds - {0}  # norms are float32 in files of 16 bits, too
        return _FLOATS[max(halves, default=0)]

    @property
    def scales_rotations(self) -> bool:
        """Whether RoPE rotates keys by other angles than its base alone gives."""
        kind = self.text(f"{self.text('general.architecture')}.rope.scaling.type")
        named = any(name.startswith(("rope_freqs", "rope_factors")) for name in self.tensors)
        return named or kind not in (None, "none")


def read_header(path: Path, name: str) -> GgufHeader:
    """Read the head of a file.

    Args:
        name: what the file is called in messages.

    Raises:
        UsageError: no GGUF file, or not a whole one.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(24)
        if start[:4] != _MAGIC:
            raise UsageError(f"`{name}` is no GGUF file")
        try:
            version, tensors, settings = struct.unpack_from("<IQQ", start, 4)
            if version not in _VERSIONS:
                raise UsageError(
                    f"`{name}` is a GGUF file of version {version}, kvtool reads 2 and 3"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data).header(tensors, settings)
        except (struct.error, UnicodeDecodeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"`{name}` is not a whole GGUF file") from None


class _Reader:
    """Walks over the head of a file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.place = 24

    def header(self, tensors: int, settings: int) -> GgufHeader:
        """Read settings, then the list of tensors; the last of these has to begin in the file."""
        found = {}
        for _ in range(settings):
            name = self.text()
            found[name] = self.value(*self.numbers("I"))
        kinds, last = {}, 0
        for _ in range(tensors):
            name = self.text()
            (axes,) = self.numbers("I")
            self.skip(8 * axes)
            kinds[name], offset = self.numbers("IQ")
            last = max(last, offset)
        if self.place + last > len(self.data):
            raise ValueError("the file ends before its last tensor begins")
        return GgufHeader(found, kinds)

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        if kind not in _NUMBERS:
            raise ValueError(f"no kind of value is {kind}")
        return self.numbers(_NUMBERS[kind])[0]

    def array(self) -> int:
        """Walk over an array and count it."""
        kind, count = self.numbers("IQ")
        if kind == _TEXT:
            for _ in range(count):
                self.skip(*self.numbers("Q"))
        elif kind in _NUMBERS:
            self.skip(count * struct.calcsize(f"<{_NUMBERS[kind]}"))
        else:
            raise ValueError(f"no array of kind {kind}")
        return count

    def text(self) -> str:
        (size,) = self.numbers("Q")
        start = self.place
        self.skip(size)
        return self.data[start : self.place].decode()

    def numbers(self, kinds: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{kinds}", self.data, self.place)
        self.place += struct.calcsize(f"<{kinds}")
        return values

    def skip(self, count: int) -> None:
        self.place += count
        if self.place > len(self.data):
            raise ValueError("the file ends within its head")
